"""What tests of plugins share with those of agl itself; `pip install "agl-core[testing]"`.

- `upstream` is a scripted model server, `scripts` is what it can say.
- `server` is a running Lightning Server in front of it, with attempts to run agents in.
- `episodes` makes sample records and episodes.
- `engines` has the checks that every engine must pass.
- `fixtures` are pytest's, to be imported into a `conftest.py`.
"""
