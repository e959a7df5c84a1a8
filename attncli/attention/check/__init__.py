"""Whether an output is right and, if not, which mistake it is: a candidate against the reference.

candidate   what is compared, the shapes it may come in, and how its memory may have been misread
variant     attention with one thing done otherwise, evaluated part by part
walk        a variant beside the candidates, how far off they are and how far they may be
compare     candidates against the reference and each other, and where their errors sit
mistakes    the table of classic mistakes
evidence    a sample of rows, how well a variant explains it, and what can be fitted to it
added       rules that the reference lacks, their sizes read off the candidates
hypotheses  which mistake explains a candidate
"""
