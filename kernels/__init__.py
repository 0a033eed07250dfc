"""Hand-written kernels with a plain torch reference beside each one. Imports
torch only, never venus.
"""
