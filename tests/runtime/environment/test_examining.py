"""Code and tests know each other by values alone, and what a test in Python asks for is answered."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from meshwright.runtime.environment.examining import passes_tests, serve_code

WORKING = {
    "a list is sorted in place": (
        """\
def s(x): x.sort()
""",
        """\
l=[[3],[1]]
l=[3,1]
s(l)
assert l==[1,3]
""",
    ),
    "rows of a list are changed": (
        """\
def t(m):
 for r in m: r.reverse()
""",
        """\
m=[[1,2],[3,4]]
row=m[0]
t(m)
assert m==[[2,1],[4,3]] and row==[2,1]
""",
    ),
    "a class with methods": (
        """\
class Stack:
 def __init__(self): self.a=[]
 def push(self,x): self.a.append(x)
 def pop(self): return self.a.pop()
 def __len__(self): return len(self.a)
""",
        """\
s=Stack()
s.push(3)
s.push('x')
assert s.pop()=='x' and len(s)==1 and s.a==[3]
""",
    ),
    "an exception of Python's": (
        """\
def f(x):
 if x<0: raise ValueError('neg')
 return x
""",
        """\
try:
 f(-1)
 assert False
except ValueError as e:
 assert str(e)=='neg'
""",
    ),
    "an exception of its own": (
        """\
class E(KeyError): pass
def f(): raise E('k')
""",
        """\
try:
 f()
 assert 0
except E as e: assert e.args==('k',)
try:
 f()
 assert 0
except KeyError: pass
""",
    ),
    "a generator": (
        """\
def g(n):
 for i in range(n): yield i
""",
        """\
assert list(g(3))==[0,1,2]
it=g(2)
assert next(it)==0 and next(it)==1
try:
 next(it)
 assert 0
except StopIteration: pass
""",
    ),
    "functions are handed over": (
        """\
def ap(f,x): return [f(y) for y in x]
""",
        """\
assert ap(lambda x:x+1,[1,2])==[2,3]
assert ap(str,[1])==['1']
assert ap(abs,[-1])==[1]
import math
assert ap(math.sqrt,[4])==[2.0]
""",
    ),
    "an object of the tests is handed over": (
        """\
def total(n):
 t=0
 while n: t+=n.v; n=n.next
 return t
""",
        """\
class N:
 def __init__(self,v,next=None): self.v=v; self.next=next
assert total(N(1,N(2)))==3
""",
    ),
    "operators of a class": (
        """\
class V:
 def __init__(s,x): s.x=x
 def __add__(s,o): return V(s.x+o.x)
 def __mul__(s,k): return V(s.x*k)
 def __eq__(s,o): return s.x==o.x
 def __repr__(s): return f'V({s.x})'
""",
        """\
assert V(1)+V(2)==V(3)
assert V(2)*3==V(6)
assert repr(V(1))=='V(1)'
assert isinstance(V(1),V)
assert V(1)!=V(2)
""",
    ),
    "a named tuple": (
        """\
from collections import namedtuple
P=namedtuple('P','x y')
def f(): return P(1,2)
""",
        """\
assert f()==(1,2)
assert f().x==1
a,b=f()
assert P(1,2)==f()
""",
    ),
    "enumerations": (
        """\
from enum import Enum, IntEnum
class C(Enum): R=1
class I(IntEnum): A=4
def f(): return C.R
""",
        """\
assert f()==C.R
assert f() == C(1)
assert C.R.value==1
assert I.A==4 and I.A+1==5
""",
    ),
    "a number of thousands of digits": (
        """\
def f(n):
 r=1
 for i in range(1,n+1): r*=i
 return r
""",
        """\
import math
assert f(3000)==math.factorial(3000)
""",
    ),
    "values of the standard library": (
        """\
from collections import *
from decimal import Decimal
from fractions import Fraction
def f(): return (deque([1]),Counter('aab'),
    OrderedDict(a=1),{1,2},frozenset([1]),b'x',Decimal('1.5'),Fraction(1,3),
    1+2j,None,float('inf'),range(3))
""",
        """\
from collections import *
from decimal import Decimal
from fractions import Fraction
assert f()==(deque([1]),Counter('aab'),
    OrderedDict(a=1),{1,2},frozenset([1]),b'x',Decimal('1.5'),Fraction(1,3),
    1+2j,None,float('inf'),range(3))
""",
    ),
    "arrays": (
        """\
import numpy as np
def f(x): return x*2
def m(a): return np.mean(a)
""",
        """\
import numpy as np
assert (f(np.array([1,2]))==np.array([2,4])).all()
assert abs(m([1,2])-1.5)<1e-9
assert np.allclose(f(np.ones((2,2))),2)
""",
    ),
    "a module that the code imported": (
        """\
import math
def f(x): return math.sqrt(x)
""",
        """\
assert math.isclose(f(2),1.41421356,rel_tol=1e-6)
""",
    ),
    "a function with a name of Python's": (
        """\
def sum(a,b): return a+b
""",
        """\
assert sum(1,2)==3
""",
    ),
    "a function with a name of Python's beside a module": (
        """\
import math
def sum(a,b): return a+b
""",
        """\
assert math.sqrt(sum(2,2))==2.0
""",
    ),
    "a module under another name": (
        """\
import math as m
import collections as c
def f(x): return c.Counter(x)
""",
        """\
assert m.floor(1.5)==1 and f('aab')==c.Counter(a=2,b=1)
""",
    ),
    "a name in a text that is evaluated": (
        """\
def f(x): return x+1
""",
        """\
assert eval('f(1)')==2
""",
    ),
    "a dictionary with defaults is handed over": (
        """\
def f(d): return d['a'], d['b']
def g(d): return len(d)
""",
        """\
from collections import defaultdict
d=defaultdict(list, a=[1])
assert g(d)==1 and d==defaultdict(list, a=[1])
assert f(d)==([1],[]) and d=={'a':[1],'b':[]} and d['c']==[]
assert f(defaultdict(lambda: 7))==(7,7)
""",
    ),
    "a dictionary with defaults is answered": (
        """\
from collections import defaultdict
def f(): return defaultdict(int, a=1)
def g(): return defaultdict(lambda: 5)
""",
        """\
from collections import defaultdict
assert f()=={'a':1} and isinstance(f(), defaultdict) and f()['b']==0 and g()['b']==5
""",
    ),
    "dictionaries of every kind are changed": (
        """\
def f(d): d['b']=d['a']; d['a']=0
""",
        """\
from collections import Counter, OrderedDict
for d in (dict(a=2), Counter(a=2), OrderedDict(a=2)):
    f(d)
    assert d==type(d)(a=0,b=2)
""",
    ),
    "arguments by name are changed": (
        """\
def f(nums, *, by): nums.sort(); by.append(1)
""",
        """\
a,b=[2,1],[]
f(nums=a, by=b)
assert a==[1,2] and b==[1]
""",
    ),
    "arguments by names that this project has too": (
        """\
def f(self, name, on): return self+name+on
""",
        """\
assert f(self=1,name=2,on=3)==6
""",
    ),
    "what is printed": (
        """\
def hello(): print('hi')
""",
        """\
import io,contextlib
b=io.StringIO()
with contextlib.redirect_stdout(b): hello()
assert b.getvalue()=='hi\\n'
""",
    ),
    "the tests call a function with the function": (
        """\
def f(x): return x+1
""",
        """\
def check(candidate):
    assert candidate(1)==2
check(f)
""",
    ),
    "cases of unittest": (
        """\
def f(x): return x+1
""",
        """\
import unittest
class T(unittest.TestCase):
 def test_a(self): self.assertEqual(f(1),2)
cases = unittest.defaultTestLoader.loadTestsFromTestCase(T)
r=unittest.TextTestRunner().run(cases)
assert r.wasSuccessful() and r.testsRun==1
""",
    ),
    "names that annotate": (
        """\
from typing import List
def f(x: List[int]) -> int: return sum(x)
""",
        """\
x: List[int]=[1,2]
assert f(x)==3
""",
    ),
    "threads": (
        """\
import threading
def f():
 r=[]
 t=[threading.Thread(target=r.append,args=(i,)) for i in range(4)]
 [i.start() for i in t]
 [i.join() for i in t]
 return sorted(r)
""",
        """\
assert f()==[0,1,2,3]
""",
    ),
    "a class that is a dictionary": (
        """\
class D(dict): pass
def f(): return D(a=1)
""",
        """\
assert f()=={'a':1}
assert f()['a']==1 and 'a' in f()
""",
    ),
    "arguments by name": (
        """\
def f(a,*,b=2): return a*b
""",
        """\
assert f(2,b=5)==10
""",
    ),
    "a with statement": (
        """\
class C:
 def __enter__(s): return 5
 def __exit__(s,*a): return False
""",
        """\
with C() as x: assert x==5
""",
    ),
    "a dataclass": (
        """\
from dataclasses import dataclass
@dataclass
class P:
 x:int
 y:int=0
""",
        """\
assert P(1)==P(1,0)
assert P(1).x==1
p=P(1)
p.x=5
assert p.x==5
""",
    ),
    "a file that is written": (
        """\
def f():
 with open('out.txt','w') as file: file.write('hey')
""",
        """\
f()
with open('out.txt') as file: assert file.read()=='hey'
""",
    ),
    "attributes that change": (
        """\
class A:
 def __init__(s): s.v=[1]
 def set(s): s.v.append(2)
""",
        """\
a=A()
a.set()
assert a.v==[1,2]
""",
    ),
    "a decorated function": (
        """\
from functools import lru_cache
@lru_cache(None)
def fib(n): return n if n<2 else fib(n-1)+fib(n-2)
""",
        """\
assert fib(80)==23416728348467685
""",
    ),
    "a default that is kept": (
        """\
def f(x,acc=[]):
 acc.append(x)
 return acc
""",
        """\
assert f(1)==[1]
assert f(2)==[1,2]
""",
    ),
    "what is in an object that is iterated over": (
        """\
class R:
 def __init__(s,n): s.n=n
 def __iter__(s): return iter(range(s.n))
class D(dict): pass
class L(list): pass
class G:
 def __contains__(s,o): return isinstance(o,R)
def g():
 yield 3
""",
        """\
assert 2 in R(3) and 3 not in R(3) and 3 in g() and 'a' in D(a=1) and 1 in L([1]) and R(1) in G()
""",
    ),
    "a class that is iterated over": (
        """\
class R:
 def __init__(s,n): s.n=n
 def __iter__(s): return iter(range(s.n))
""",
        """\
assert list(R(3))==[0,1,2]
assert sum(R(4))==6
""",
    ),
}
"""Code and tests that it passes."""


def verdict(code: str, tests: str) -> bool:
    """Of tests that run here, and code that runs in a fork of this process."""
    own, other = socket.socketpair()
    child = os.fork()
    if not child:
        own.close()
        try:
            serve_code(code, other.makefile("rb"), other.makefile("wb"))
        finally:
            os._exit(0)
    other.close()
    with own, own.makefile("rb") as incoming, own.makefile("wb") as outgoing:
        found = passes_tests(tests, incoming, outgoing)
    own.close()
    os.waitpid(child, 0)
    return found


@pytest.mark.parametrize("name", WORKING)
def test_code_that_does_what_its_tests_ask_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert verdict(*WORKING[name])


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("def f(x): return x", "assert f(1) == 2"),
        ("def f(x): return x", "assert g(1) == 1"),
        ("def f(x): raise ValueError", "f(1)"),
        ("import os\ndef f(x): os._exit(0)", "try:\n    f(1)\nexcept Exception:\n    pass"),
        ("def f(x): return x", "raise SystemExit(0)"),
        ("def f(x): return x", ""),
        ("raise SystemExit(0)", "assert True"),
        ("class A:\n    __eq__ = lambda *_: True\nf = lambda x: A()", "assert f(1) == 1"),
        ("class A:\n    __contains__ = lambda *_: True\nf = lambda x: A()", "assert 3 in f(1)"),
        ("class A:\n    __contains__ = lambda *_: False\nf = lambda x: A()", "assert 3 not in f(1)"),
        ("class A:\n    def __iter__(s): return iter([1])\nf = lambda x: A()", "assert 3 in f(1)"),
        ("class A:\n    __lt__ = __gt__ = lambda *_: True\nf = lambda x: A()", "assert f(1) < 1"),
        ("class A:\n    __sub__ = lambda *_: 0.0\nf = lambda x: A()", "assert abs(f(1) - 1) < 1e-6"),
        ("class A:\n    __float__ = lambda *_: 1.0\nf = lambda x: A()", "import math\nassert math.isclose(f(1), 1)"),
        (
            "import numpy\nclass A:\n    __sub__ = lambda *_: numpy.zeros(1)\nf = lambda x: A()",
            "assert (f(1) - 1)[0] == 0",
        ),
        ("class M:\n    isclose = lambda *_: True\nmath = M()\nf = lambda x: 0", "assert math.isclose(f(1), 1)"),
        ("def f(x): return x.__globals__", "def g(): return 1\nassert 'f' in f(g)"),
    ],
)
def test_any_other_code_does_not(code: str, tests: str) -> None:
    assert not verdict(code, tests)
