"""Tools for tests of plugins, which agl's own tests use too; `pip install "agl-server[testing]"`.

- `upstream`: a scripted model server; `scripts`: its replies.
- `server`: a Lightning Server in front of it, attempts to run agents in, and a fixture that fails where adapters fail.
- `episodes`: sample records and episodes.
- `engines`: the checks that every engine must pass.
"""
