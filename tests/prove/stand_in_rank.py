"""Answers as a trainer rank does, without torch, and goes wrong in one request.

python stand_in_rank.py FOLDER NUM_REQUESTS WRONG_REQUEST die|hang"""

import json
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
wrong_request = int(sys.argv[3])
for number in range(int(sys.argv[2])):
    if number == wrong_request:
        print("Traceback of the end", file=sys.stderr, flush=True)
        if sys.argv[4] == "hang":
            time.sleep(600)
        sys.exit(3)
    answer = {"after_build": 1, "after_first_step": 2, "peak": 10 + number}
    (folder / f"answer-{number}.json").write_text(json.dumps(answer))
