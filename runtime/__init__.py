"""Executes plans on MPI ranks."""
