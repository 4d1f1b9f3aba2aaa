"""An agent with a calculator, written with OpenAI's public client. It knows nothing of this
project: the same file works with any server that speaks the API.

    echo '{"question": "12*34", "answer": "408"}' | OPENAI_MODEL=gpt-4o python agent_program.py

`grpo-megatron train agent_program.toml` trains it as it is."""

import ast
import json
import operator
import os
import sys

from openai import OpenAI

MAX_TURNS = 3
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes an expression with + - *.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(expression: str) -> int:
    """The value of an expression; ValueError or SyntaxError where it is none."""
    return value_of(ast.parse(expression.strip(), mode="eval").body)


def value_of(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("only numbers, +, - and * are allowed")


def result_of(call) -> str:
    """What the model reads of a call: the value, or what is wrong."""
    try:
        return str(calculate(json.loads(call.function.arguments)["expression"]))
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        return f"error: {error}"


def solve(client: OpenAI, question: str) -> tuple[str, int]:
    """The answer, and how many calls were made on the way."""
    messages = [{"role": "user", "content": question}]
    num_calls = 0
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=os.environ.get("OPENAI_MODEL", "gpt-4o"), messages=messages, tools=[CALCULATOR]
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or "", num_calls
        for call in message.tool_calls:
            num_calls += 1
            result = {"role": "tool", "tool_call_id": call.id, "content": result_of(call)}
            messages.append(result)
    return "", num_calls


def main() -> None:
    problem = json.load(sys.stdin)
    answer, num_calls = solve(OpenAI(), problem["question"])
    is_right = answer.strip() == problem["answer"]
    # a model that never calls learns to call first: a digit of credit for a call that was read
    print(json.dumps({"reward": float(is_right) + 0.1 * min(num_calls, 1)}))


if __name__ == "__main__":
    main()
