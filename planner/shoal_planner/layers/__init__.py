"""Which devices run which layers: cuts and devices chosen together. Pure; numpy alone.

    graph          layers, the tensors between them, devices, links
    cuts           the graph's legal cuts, and fewer of them where there are too many
    costs          what a run of layers costs a group of devices, and what crossing a cut costs
    arcs, search   the dynamic program: which groups follow one another, and the best way through
    front          the best plan of an objective, from what the search finds for a given period
    bounds         what no plan can beat
    shortest       the shortest way of one item, if a device could serve several stages
    local_search   better groups by small moves, where not all can be tried
    planning       the phases: search, bound, alternatives
    alternatives   the plans that one would think of first
    plans          what planning answers, in values and in tables
    documents      profiles and devices, read from JSON and from the formats of two published sets

Here belongs planning at the level of layers, before a model is cut. Not here: the placement of
fragments that exist (`shoal_planner.placement`).
"""
