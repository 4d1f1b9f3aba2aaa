"""An agent program that does what its first argument says; the public client is all that it knows.

Run as `python programs.py DEED`, with the problem as JSON on standard input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

SLEEPER = [sys.executable, "-c", "import time; time.sleep(1000)"]


def ask(*messages):
    from openai import OpenAI

    client = OpenAI(max_retries=0)
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    return answer.choices[0].message.content


def main(deed: str) -> None:
    problem = json.load(sys.stdin)
    question = {"role": "user", "content": problem["question"]}
    if deed == "silent":
        return
    reply = ask(question)
    if deed == "reward":
        print("chatter")
        print(json.dumps({"reward": float(reply == problem["answer"]), "more": [1]}))
    elif deed == "told":
        told = {"directory": os.getcwd(), "files": os.listdir(), "problem": problem}
        told["key"] = os.environ["PROGRAM_KEY"]
        print(json.dumps({"reward": 0.5, **told}))
        with open(os.environ["TOLD"], "w") as file:
            json.dump(told, file)
    elif deed == "no-reward":
        print("the end")
    elif deed == "null":
        print(json.dumps({"reward": None}))
    elif deed == "crash":
        raise ValueError("this program is broken")
    elif deed == "garbage":
        print('{"reward": "high"}')
    elif deed == "infinite":
        print('{"reward": 1e999}')
    elif deed == "nan":
        print('{"reward": NaN}')
    elif deed == "transcript":
        print(json.dumps({"reward": 1.0, "transcript": "y" * (4 << 20)}) + "\n \n")
    elif deed == "long-transcript":
        print(json.dumps({"reward": 1.0, "transcript": "y" * (9 << 20)}))
    elif deed == "flood":
        line = "x" * (1 << 20) + "\n"
        for _ in range(64):
            sys.stdout.write(line)
            sys.stderr.write(line)
        print('{"reward": 0.25}')
    elif deed == "hang":
        child = subprocess.Popen(SLEEPER)
        with open(os.environ["TOLD"], "w") as file:
            json.dump([os.getpid(), child.pid], file)
        time.sleep(1000)
    elif deed == "leave":  # a child that holds the output, in a session of its own
        child = subprocess.Popen(SLEEPER, start_new_session=True)
        with open(os.environ["TOLD"], "w") as file:
            json.dump([child.pid], file)
        print('{"reward": 0.25}')
    elif deed == "on":  # until it is refused
        messages = [question]
        while True:
            messages += [{"role": "assistant", "content": reply}, question]
            reply = ask(*messages)


if __name__ == "__main__":
    main(sys.argv[1])
