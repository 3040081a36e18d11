"""One Python function per operation on expert weights; reference.py is the truth."""
