"""Where a model is cut and which devices serve which fragments, with the reasons. Pure.

    profile, segments, arena     a model as numbers: what each run of its nodes takes and costs
    cuts, advice                 where to cut; what to change where no cut fits
    finer_cuts, parts            what to cut for where a fragment, as measured, fits on no device
    costs, search, placement     which devices serve which fragments
    replanning                   the plan that follows the one in force
    alternatives, explanation    why other placements lost, in tables
    figures, schedule            the same for programs and pictures: seconds, bytes, what is when
    budgets                      what other budgets would give
    layers/                      cuts and devices chosen together, from measured layers

Here belong: choosing cuts, placement, what a plan costs. Not here: how a graph is cut
(`shoal_compiler`), and which task runs next (the coordinator's dispatcher). It imports no library;
`layers` alone imports numpy.
"""
