"""Whether an output is right and, if not, which mistake it is: a candidate against the reference.

candidate   what is compared, and the shapes that it may come in
variant     attention with one thing done otherwise, evaluated on chosen rows
tolerance   how far an honest kernel of a dtype may be off
difference  errors of a candidate, gathered block by block
places      where the errors sit
nonfinite   why a candidate holds NaN or inf
mistakes    the table of classic mistakes
hypotheses  which of them explain a candidate
compare     candidates against the reference; pair: two of them against each other as well
"""
