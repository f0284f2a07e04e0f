"""The commands that are asked before there is a plan: the devices and documents that are known, a first job,
how many devices it needs."""
