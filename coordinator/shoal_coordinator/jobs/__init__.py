"""The life of jobs as a state machine, from the submission to the recorded end. PURE.

    values    what is known of a job: submission, statistics, end
    events    what happens            in
    effects   what is to be done      out
    machine   the states, their rules, and `step`, which turns one into the other

Here belongs what follows from what, for one job. Not here: files, threads and calls (`server`,
which performs the effects and reports their outcomes), and which task runs where (`dispatch`).
"""
