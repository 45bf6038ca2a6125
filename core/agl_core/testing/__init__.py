"""Tools for tests of plugins, which agl's own tests use too; `pip install "agl-core[testing]"`.

- `upstream` is a scripted model server, `scripts` is what it can say.
- `server` is a running Lightning Server in front of it, with attempts to run agents in, and a fixture of pytest that
  fails a test in which an adapter fails.
- `episodes` makes sample records and episodes.
- `engines` has the checks that every engine must pass.
"""
