"""The commands that read recorded runs, and bring data in and out."""
