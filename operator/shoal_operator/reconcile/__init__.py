"""What is to be done about an object: one pure function per kind, snapshot -> `Decision`.

Level-based: a decision depends on what is, never on what happened, so reconciling the result of a
decision changes nothing, and a restarted operator resumes where the last one stopped.
"""
