"""What the tests of plugins share with those of agl itself; `pip install "agl-core[testing]"`.

- `upstream` is a scripted model server, `scripts` is what it can say.
- `server` is a running Lightning Server in front of it, with attempts to run agents in.
- `episodes` makes sample records and episodes.
- `adapters` plays scenarios with a framework's real API and checks what comes of it.
- `engines` has the checks that every engine must pass.
- `http` serves a test's own application, and has a relay to put before a server.
- `readme` runs the code of a page.
- `privacy` keeps frameworks from speaking to their vendors, `clients` takes the waiting out of model clients.
- `browser` drives a real Chromium, for the pages of runs and their pictures.
- `fixtures` are pytest's, to be imported into a `conftest.py`.
"""
