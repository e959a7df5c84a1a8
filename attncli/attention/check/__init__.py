"""Whether an output is right and, if not, which mistake it is: a candidate against the reference.

candidate   what is compared, the shapes it may come in, and how its memory may have been misread
variant     attention with one thing done otherwise, evaluated part by part
tolerance   how far an honest kernel of a dtype may be off, cell by cell and head by head
walk        a variant beside the candidates, part by part, and the sums of their errors
locations   where the errors sit, and why a candidate holds NaN or inf
compare     candidates against the reference, and against each other
evidence    a sample of rows, and how well a variant explains the candidates there
mistakes    the table of classic mistakes
fitted      mistakes read off the candidates: a scale, value heads, dropout
hypotheses  which mistake explains a candidate
"""
