"""Programs that are nobody's friends, as data, and some that are.

A hostile one prints ESCAPED where its attack works, REFUSED where it was refused as it should be.
`CANARY` stands for a file outside of the sandbox, `PORT` for a listening port of this machine,
`LOCAL` for the path and `ABSTRACT` for the name of a Unix socket outside, `OUTSIDE` for a process.
"""

from __future__ import annotations

PRELUDE = """
import ctypes, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"

def libc_call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)

def attempt(action, *arguments, **options):
    try:
        action(*arguments, **options)
    except BaseException as error:
        print("REFUSED", type(error).__name__, error, flush=True)
    else:
        print("ESCAPED", flush=True)

def forever(action):
    while True:
        action()

def read(path):
    with open(path) as file:
        return file.read()

def write(path):
    with open(path, "w") as file:
        file.write("harm")
"""

REFUSED = {
    "fork bomb": "attempt(os.fork); attempt(forever, os.fork)",
    "fork by vfork": "attempt(libc_call, 'syscall', 58 if X86 else 1079)",
    "fork by clone": "attempt(libc_call, 'syscall', 56 if X86 else 220, 17, 0, 0, 0, 0)",
    "fork by clone3": "attempt(libc_call, 'syscall', 435, ctypes.create_string_buffer(88), 88)",
    "busy subprocess": "attempt(subprocess.run, [sys.executable, '-c', 'while True: pass'])",
    "spawn": "attempt(os.posix_spawn, '/usr/bin/env', ['env'], {})",
    "daemon that outlives": "attempt(subprocess.Popen, ['sleep', '1000'], start_new_session=True)",
    "memory by many processes": """
def grow():
    os.fork()
    bytearray(300 << 20)
attempt(grow)""",
    "fork in a thread": """
def fork():
    attempt(os.fork)
thread = threading.Thread(target=fork); thread.start(); thread.join()""",
    "fork by multiprocessing": """
import multiprocessing
attempt(multiprocessing.get_context("fork").Process(target=print).start)""",
    "a pool of processes": """
from concurrent.futures import ProcessPoolExecutor
attempt(lambda: ProcessPoolExecutor(2).submit(print).result())
sys.stdout.flush(); os._exit(0)""",
    "a terminal of its own": "import pty\nattempt(pty.fork)",
    "memory of extended attributes": "attempt(os.setxattr, '/tmp', 'user.x', bytes(60000))",
    "memory of watches": "attempt(libc_call, 'inotify_init1', 0)",
    "memory that is locked": "attempt(libc_call, 'mlockall', 3)",
    "memory of pipes": """
import fcntl
held = []
def fill():
    _, end = os.pipe()
    fcntl.fcntl(end, 1031, 1 << 20)
    held.append(end)
attempt(forever, fill)""",
    "memory bomb": "blocks = []; attempt(forever, lambda: blocks.append(bytearray(16 << 20)))",
    "memory mapped": "import mmap\nattempt(mmap.mmap, -1, 1 << 30)",
    "zip bomb": """
import zlib
packer = zlib.compressobj(9)
bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(280)) + packer.flush()
attempt(zlib.decompress, bomb)""",
    "memory of SysV segments": "attempt(libc_call, 'shmget', 0, ctypes.c_size_t(1 << 20), 0o1600)",
    "memory of memfd": "attempt(os.memfd_create, 'x')",
    "threads bomb": """
threading.stack_size(8 << 20)
attempt(forever, lambda: threading.Thread(target=time.sleep, args=(5,), daemon=True).start())
sys.stdout.flush(); os._exit(0)""",
    "recursion": "def f(): f()\nattempt(f)",
    "filling /tmp": """
names = iter(range(10**6))
def fill():
    with open(f"/tmp/{next(names)}", "wb") as file:
        file.write(bytes(1 << 20))
attempt(forever, fill)""",
    "huge file": "file = open('/tmp/x', 'wb'); attempt(forever, lambda: file.write(bytes(1<<20)))",
    "huge sparse file": "file = open('/tmp/huge', 'wb'); attempt(file.truncate, 1 << 40)",
    "huge file that is promised": """
file = os.open('/tmp/x', os.O_CREAT | os.O_RDWR)
attempt(os.posix_fallocate, file, 0, 1 << 30)""",
    "files without end": "a = []; attempt(forever, lambda: a.append(open('/tmp/x', 'w')))",
    "connect": "attempt(socket.create_connection, ('127.0.0.1', PORT), timeout=5)",
    "resolve": "attempt(socket.getaddrinfo, 'localhost.example', 80)",
    "send datagrams": "attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)",
    "abstract unix socket": "attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0x'))",
    "abstract unix socket by a pair": """
ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
attempt(ours.sendto, b'harm', '\\0' + ABSTRACT)""",
    "unix socket in a file": """
ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
attempt(ours.sendto, b'harm', LOCAL)""",
    "unix socket of the display": "attempt(os.listdir, '/tmp/.X11-unix')",
    "raw packets": "attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)",
    "virtual machine sockets": "attempt(socket.socket, 40, socket.SOCK_STREAM)",
    "netlink": "attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW)",
    "read /root": "attempt(os.listdir, '/root/.ssh')",
    "read home": "attempt(os.listdir, '/home')",
    "read /etc/shadow": "attempt(read, '/etc/shadow')",
    "read /etc/passwd": "attempt(read, '/etc/passwd')",
    "read the canary": "attempt(read, CANARY)",
    "read the canary by a link": "os.symlink(CANARY, '/tmp/link'); attempt(read, '/tmp/link')",
    "read the canary by ..": "attempt(read, '/tmp/../../../../..' + CANARY)",
    "hard link to the canary": "attempt(os.link, CANARY, '/tmp/link')",
    "hard link to Python": "attempt(os.link, sys.executable, '/tmp/link')",
    "write the canary by a link": "os.symlink(CANARY, '/tmp/link'); attempt(write, '/tmp/link')",
    "write Python by a link": """
os.symlink(sys.executable, '/tmp/link'); attempt(write, '/tmp/link')""",
    "a link in place of the program": """
os.symlink('/tmp/other', '/tmp/link'); attempt(os.replace, '/tmp/link', __file__)""",
    "move a directory of the system": "attempt(os.rename, '/usr/lib', '/tmp/lib')",
    "Python mapped for writing": """
import mmap
file = open(sys.executable, "rb")
attempt(mmap.mmap, file.fileno(), 4096, mmap.MAP_SHARED, mmap.PROT_WRITE)""",
    "times of a file": "attempt(os.utime, '/usr/bin/env')",
    "processes of others": "attempt(os.listdir, '/proc')",
    "command lines of others": "attempt(read, '/proc/1/cmdline')",
    "descriptors by /proc": "attempt(os.listdir, '/proc/self/fd')",
    "namespaces by /proc": "attempt(os.open, '/proc/1/ns/net', os.O_RDONLY)",
    "the kernel's log": """
attempt(libc_call, 'klogctl', 3, ctypes.create_string_buffer(4096), 4096)""",
    "devices": "attempt(os.listdir, '/dev')",
    "the kernel's settings": "attempt(os.listdir, '/sys')",
    "read the environment": "attempt(lambda: os.environ['REWARD_SECRET'])",
    "read another's environment": "attempt(read, '/proc/1/environ')",
    "read kernel memory": "attempt(read, '/proc/kcore')",
    "write the canary": "attempt(write, CANARY)",
    "write to /usr": "attempt(write, '/usr/harm')",
    "write to the root": "attempt(write, '/harm')",
    "write to /etc": "attempt(write, '/etc/ld.so.preload')",
    "write to Python": "attempt(write, os.path.join(sys.base_prefix, 'lib', 'harm.py'))",
    "write the program": "attempt(write, __file__)",
    "write to shared memory": "attempt(write, '/dev/shm/harm')",
    "write the standard input": "attempt(os.write, 0, b'harm')",
    "mode of a device": "attempt(os.chmod, '/dev/null', 0)",
    "mode of an open file": "attempt(os.fchmod, 0, 0)",
    "owner of a file": "attempt(os.chown, '/tmp', 1, 1)",
    "kill everything": "attempt(os.kill, -1, 9)",
    "ptrace": "attempt(libc_call, 'ptrace', 16, 1, 0, 0)",
    "ptrace of itself": "attempt(libc_call, 'ptrace', 0, 0, 0, 0)",
    "ptrace without a stop": "attempt(libc_call, 'ptrace', 0x4206, 1, 0, 0)",
    "descriptor of a process": "attempt(libc_call, 'syscall', 434, 1, 0)",
    "write another's memory": """
attempt(libc_call, 'process_vm_writev', 1, None, ctypes.c_ulong(0), None, ctypes.c_ulong(0), 0)""",
    "signal to who is outside": "attempt(os.kill, OUTSIDE, 0)",
    "read another's memory": """
attempt(libc_call, 'process_vm_readv', 1, None, ctypes.c_ulong(0), None, ctypes.c_ulong(0), 0)""",
    "mount": "attempt(libc_call, 'mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "unmount": "attempt(libc_call, 'umount2', b'/tmp', 2)",
    "new namespaces": "attempt(libc_call, 'unshare', 0x10000000)",
    "enter namespaces": "attempt(libc_call, 'setns', 0, 0)",
    "clone into new namespaces": """
attempt(libc_call, 'syscall', 56 if X86 else 220, 0x10000011, 0, 0, 0, 0)""",
    "chroot": "attempt(os.chroot, '/tmp')",
    "io_uring": "attempt(libc_call, 'syscall', 425, 1, ctypes.create_string_buffer(120))",
    "key ring": "attempt(libc_call, 'syscall', 250 if X86 else 219, 0, 0)",
    "capabilities": """
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
attempt(libc_call, 'capset', header, (ctypes.c_uint32 * 6)(*[2**32 - 1] * 6))""",
    "priority": "attempt(os.setpriority, os.PRIO_PROCESS, 0, -5)",
    "real-time scheduling": """
attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))""",
    "set the clock": "attempt(time.clock_settime, time.CLOCK_REALTIME, 0)",
    "kernel module": "attempt(libc_call, 'syscall', 175 if X86 else 105, b'x', 1, b'')",
    "reboot": "attempt(libc_call, 'reboot', 0x01234567)",
    "disks of the machine": "attempt(libc_call, 'syncfs', 0)",
    "quotas of the machine": """
attempt(libc_call, 'syscall', 179 if X86 else 60, 0x80000100, 0, 0, 0)""",
    "become root": "attempt(os.setuid, 0)",
    "raise a limit": "attempt(resource.setrlimit, resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "a device": "attempt(os.mknod, '/tmp/mem', 0o600 | 0o020000, os.makedev(1, 1))",
    "type into the terminal": "import fcntl\nattempt(fcntl.ioctl, 0, 0x5412, b'x')",
    "host name": "attempt(socket.sethostname, 'harm')",
    "files of the harness": """
def look():
    found = [os.read(number, 100) for number in range(3, 64) if is_open(number)]
    assert found
def is_open(number):
    try: os.fstat(number)
    except OSError: return False
    return True
attempt(look)""",
    "descriptors of the harness": """
def use():
    found = []
    for number in range(3, 1024):
        try: found.append(os.fstat(number))
        except OSError: pass
    assert found
attempt(use)""",
}

ENDLESS = {
    "loop": "while True: pass",
    "sleep": "time.sleep(1e6)",
    "signals ignored": """
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True: time.sleep(1)""",
    "loop at exit": "import atexit\natexit.register(forever, int)",
    "output closed": "os.closerange(0, 64)\nwhile True: pass",
    "threads that stay": "threading.Thread(target=time.sleep, args=(1e6,)).start()",
    "sleep in a destructor": """
class Kept:
    def __del__(self): time.sleep(1e6)
kept = Kept()""",
    "destructor that makes another": """
class Kept:
    def __del__(self): Kept()
Kept()
while True: pass""",
    "a pipe without a writer": "os.mkfifo('/tmp/pipe'); open('/tmp/pipe')",
    "a lock twice": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "without its parent": "libc.prctl(1, 0); time.sleep(1e6)",
    "a signal that wakes it": """
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
while True: signal.pause()""",
    "threads that compute": """
for _ in range(8): threading.Thread(target=forever, args=(int,)).start()""",
    "exit that never comes": "sys.stdout.flush(); sys.exit(time.sleep(1e6))",
    "directories without end": """
names = iter(range(10**9))
while True: os.mkdir(f"/tmp/{next(names)}")""",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1e6)",
    "regular expression": "import re\nre.match('(a+)+b', 'a' * 100)",
    "huge number": "10 ** 10 ** 9",
    "exec of something patient": "os.execv('/usr/bin/sleep', ['sleep', '1000'])",
}

FLOODS = {
    "output": "while True: print('x' * 4096)",
    "error output": "while True: print('x' * 4096, file=sys.stderr)",
    "raw output": "while True: os.write(1, bytes(65536))",
    "one line": "while True: sys.stdout.write('x' * 4096)",
    "flood at exit": "import atexit\natexit.register(forever, lambda: print('x' * 4096))",
    "flood and exit": "print('x' * (4 << 20)); sys.exit(0)",
    "threads that print": """
for _ in range(4): threading.Thread(target=forever, args=(lambda: print('x' * 4096),)).start()""",
    "a flood without its output": "os.dup2(2, 1)\nwhile True: print('x' * 4096)",
}

EXITS = {
    "exit 0": (0, "sys.exit(0)"),
    "_exit 0": (0, "os._exit(0)"),
    "exit at exit": (0, "import atexit\natexit.register(os._exit, 0)\nraise ValueError"),
    "exec true": (0, "os.execv('/usr/bin/true', ['true'])"),
    "segmentation fault": (139, "ctypes.string_at(0)"),
    "abort": (134, "os.abort()"),
    "kill itself": (137, "os.kill(os.getpid(), 9)"),
    "kill the parent": (0, "os.kill(os.getppid(), 9); os.kill(1, 9)"),
    "signals to the parent": (
        0,
        """
for number in set(signal.Signals) | {0}:
    for process in {os.getppid(), 1}:
        try: os.kill(process, number)
        except OSError: pass""",
    ),
    "kill its group": (137, "os.killpg(0, 9); time.sleep(60)"),
    "fork bomb of a shell": (2, "os.execv('/bin/sh', ['sh', '-c', 'f() { f | f & }; f'])"),
    "program of root": (1, "os.execv('/usr/bin/su', ['su', '-c', 'true'])"),
    "read address 0": (139, "import ctypes\nctypes.string_at(0)"),
    "fake a failed sandbox": (1, "print('bwrap: no permission', file=sys.stderr); os._exit(1)"),
}

# Against asserts: the function f is asked for f(1) == 2, f(2) == 3 and f(-1) != 1.
CHEATS = {
    "exit 0": "import sys\nsys.exit(0)",
    "_exit 0": "import os\nos._exit(0)",
    "_exit in the call": "import os\ndef f(x): os._exit(0)",
    "exit in the call": "def f(x): raise SystemExit(0)",
    "print the marks": "import os\nprint('s111', flush=True)\nos.write(1, b's111')\n"
    "def f(x): print('s111')",
    "marks on every file": """
import os
for number in range(64):
    try: os.write(number, b's111')
    except OSError: pass
os._exit(0)""",
    "marks as an exception": "def f(x): raise Exception('s111')",
    "the test is no good": """
import sys
def f(x): raise sys.modules['__main__'].BadTest()""",
    "read the tests": """
import sys
asserts = sys.stdin.read() + ' '.join(sys.argv)
def f(x): return int(asserts.split('== ')[x][0])""",
    "its end of the link": """
import os
os.closerange(3, 64)
def f(x): return x + 1""",
    "a flood on the link": """
import os
def f(x):
    while True:
        for number in range(3, 64):
            try: os.write(number, b'(' * 65536)
            except OSError: pass""",
    "a pickle that calls": """
import os
def f(x):
    for number in range(3, 64):
        try: os.write(number, b'\\x80\\x04\\x89K\\x00QK\\x01\\x85R\\x86.')
        except OSError: pass""",
    "a pickle of the judge's functions": """
import os
def f(x):
    for number in range(3, 64):
        try: os.write(number, b'\\x80\\x04\\x89c__main__\\nRemote\\n\\x86.')
        except OSError: pass""",
    "numbers of no object": """
import sys
class Any: pass
sys.modules['__main__'].Sender.persistent_id = lambda self, value: -1
def f(x): return Any()""",
    "names of the judge": "def f(x): return __builtins__\nis_judge = asked = ask = names = True",
    "iterator without end": """
import itertools
def f(x): return itertools.count()""",
    "override ==": """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return True
    def __bool__(self): return True
    def __hash__(self): return 0
def f(x): return Any()""",
    "override == of a number": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return True
def f(x): return Any(7)""",
    "a pickle of a class": """
import sys
class Any:
    def __eq__(self, other): return True
    __ne__ = __eq__
    def __reduce__(self): return (eval, ("type('A', (), {'__eq__': lambda *_: True})()",))
sys.modules['__main__'].plain = lambda value: value
sys.modules['__main__'].Sender.persistent_id = lambda self, value: None
def f(x): return Any()""",
    "replies without a question": """
import gc, pickle, sys
frame = sys._getframe()
while frame:
    for value in frame.f_locals.copy().values():
        if callable(getattr(value, 'write', None)):
            value.write(pickle.dumps((False, True)) * 9)
            value.flush()
    frame = frame.f_back
def f(x): return True""",
    "other builtins": """
import builtins
builtins.AssertionError = builtins.abs = builtins.int = lambda *_: 2
def f(x): return None""",
    "other modules": """
import sys
sys.modules.clear()
def f(x): return None""",
    "frames and the collector": """
import gc, sys
for value in gc.get_objects():
    if isinstance(value, dict) and 'names' in value: value['names'] = {}
def f(x): return sys._getframe(1).f_locals.get('expected')""",
    "assert as a name": "globals()['assert'] = lambda *_: None\ndef f(x): return 0",
    "nothing": "pass",
    "syntax error": "def f(x: return",
    "loops": "def f(x):\n    while True: pass",
    "memory": "def f(x): return [0] * 10**9",
    "endless data": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "deep data": """
def f(x):
    value = []
    for _ in range(10**6): value = [value]
    return value""",
    "garbage": """
import os
for number in range(3, 64):
    try: os.write(number, b'\\x80\\x05\\x8e' + b'\\xff' * 100)
    except OSError: pass
def f(x): return 0""",
    "NaN": "def f(x): return float('nan')",
    "None": "def f(x): return None",
    "wrong type": "def f(x): return str(x + 1)",
    "almost": "def f(x): return x + 1 if x > 1 else x",
    "raises": "def f(x): raise AssertionError",
    "raises something else": "import os\ndef f(x): raise type('os', (Exception,), {})('system')",
    "raises what no exception takes": """
class Any(Exception):
    args = 3
Any.__name__ = 'UnicodeDecodeError'
def f(x): raise Any""",
}

# Those that only the limit of time ends.
SLOW_CHEATS = {
    "loops",
    "deep data",
    "a flood on the link",
    "a pickle that calls",
    "iterator without end",
}

# Program, its standard input, its standard output.
HONEST_PAIRS = {
    "sum": ("a, b = map(int, input().split())\nprint(a + b)", "3 4\n", "7\n"),
    "all input": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", "1\n2\n3", "6"),
    "buffer": ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.readline())", "é\n", "é"),
    "white space": ("print('1 ')\nprint()\nprint('2')\nprint()", "", "1\n\n2\n"),
    "guard": ("if __name__ == '__main__':\n    print(open(0).read())", "x", "x"),
    "thread": (
        "import threading\nt = threading.Thread(target=print, args=(5,))\nt.start()\nt.join()",
        "",
        "5",
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**5)\n"
        "def f(n): return n and 1 + f(n - 1)\nprint(f(20000))",
        "",
        "20000",
    ),
    "exit()": ("print(1)\nexit()", "", "1"),
    "a file": ("open('x', 'w').write('7')\nprint(open('/tmp/x').read())", "", "7"),
    "asyncio": ("import asyncio\nasync def f(): return 3\nprint(asyncio.run(f()))", "", "3"),
    "random": ("import os, secrets\nprint(len(os.urandom(4) + secrets.token_bytes(4)))", "", "8"),
    "much output": ("print('x' * 500000)", "", "x" * 500000),
    "much input": ("print(len(input()))", "y" * 3000000, "3000000"),
    "warnings": ("import sys\nprint('noise', file=sys.stderr)\nprint(2)", "", "2"),
}

# Program, asserts, setup.
HONEST_ASSERTS = {
    "numbers": ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(-1) != 1"], ""),
    "containers": (
        "def f(x): return {1: (x, [x], {x})}",
        ["assert f(2) == {1: (2, [2], {2})}"],
        "",
    ),
    "setup": (
        "def f(x): return x / 3",
        ["assert math.isclose(f(1), third)"],
        "import math\nthird = 1 / 3",
    ),
    "not close": (
        "def f(x): return x / 3",
        ["assert abs(f(1) - 0.33) < 0.01", "assert not f(0)"],
        "",
    ),
    "class": (
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x); return self\n"
        "    def top(self): return self.items[-1]",
        ["assert Stack().push(3).top() == 3", "s = Stack().push(4)\nassert s.items == [4]"],
        "",
    ),
    "generator": ("def f(n): yield from range(n)", ["assert list(f(3)) == [0, 1, 2]"], ""),
    "counter": (
        "from collections import Counter\ndef f(s): return Counter(s)",
        ["assert f('aab') == {'a': 2, 'b': 1}"],
        "",
    ),
    "named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return [P(1, 2)]",
        ["assert f() == [(1, 2)]"],
        "",
    ),
    "comprehension": (
        "def f(x): return x * x",
        [
            "assert all(f(x) == y for x, y in [(1, 1), (3, 9)])",
            "assert [f(x) for x in range(3)] == [0, 1, 4]",
        ],
        "",
    ),
    "sorted with a key": ("def f(x): return -x", ["assert sorted([1, 2], key=f) == [2, 1]"], ""),
    "noise": (
        "print('noise' * 1000)\ndef f(x):\n    print('more')\n    return x",
        ["assert f('é') == 'é'"],
        "",
    ),
    "state": (
        "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
        ["assert f() == 1", "assert f() == 2"],
        "",
    ),
    "an exception": (
        "class Bad(ValueError): pass\ndef f(x): raise Bad('no', x)",
        [
            "try:\n    f(1)\nexcept ValueError as error:\n    assert error.args == ('no', 1)\n"
            "else:\n    assert False",
            "import contextlib\nwith contextlib.suppress(ValueError):\n    f(1)",
        ],
        "",
    ),
    "an exception of its own": (
        "class Bad(Exception): pass\ndef f(x): raise Bad",
        ["try:\n    f(1)\nexcept Exception:\n    pass\nelse:\n    assert False"],
        "",
    ),
    "a missing attribute": (
        "class Box: pass",
        ["assert not hasattr(Box(), 'size')", "assert getattr(Box(), 'size', 3) == 3"],
        "",
    ),
    "infinity": ("def f(): return float('inf')", ["assert f() == float('inf')"], ""),
}
