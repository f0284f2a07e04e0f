"""The functions behind the command line and `meshwright.api`: documents in, documents out.

torch loads with the first call that needs it.
"""
