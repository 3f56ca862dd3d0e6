"""Copying files between a folder, an S3 bucket, a web server, an OCI registry and a coordinator.

    addresses   what an address means: a source to read, or a target to write
    places      what sources and targets have in common, and the two kinds of error
    folders, objects, web, registry, coordinators      the places
    copying     a folder's files from a source to a target
    models      a model by its address, on this machine's disk

Here belong bytes and addresses. Not here: what is in the files.

No file is ever held in memory: it passes through in pieces of about a megabyte. A file is seen at a
target when it is whole; one that broke off is resumed where the place can (folders and
coordinators, from any source), and one that is there with the same size and digest is skipped.
"""
