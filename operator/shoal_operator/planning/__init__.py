"""Where a model is cut and which devices serve which fragments, with the reasons. Pure.

Here belong: choosing cuts, placement, what a plan costs and why the alternatives lost. Not here:
how a graph is cut (`modelling`), and which task runs next (`dispatch`).
"""
