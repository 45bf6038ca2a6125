"""The process that shows a run while another one writes it (`serving.shown_beside`)."""

from __future__ import annotations

import sys

from agl_view.serving import answer_beside

if __name__ == "__main__":
    answer_beside(int(sys.argv[1]), sys.stdin.buffer)
