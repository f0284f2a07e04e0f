"""Commands to use before there is a plan: known devices and documents, a first job, the number of devices."""
