"""A database connection that only one thread may use, in a thread that only this class has.

    ingress run app_examples.serial:app

    curl http://127.0.0.1:8000/    1

`__init__`, `__del__` and the `serial` method run in one thread, which owns the connection. It runs
one call at a time: no other call comes between the two statements, and the event loop stays free.
"""

import sqlite3

import ingress as serve


@serve.deployment
class Visits:
    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table visits (number integer)")

    def __del__(self) -> None:
        self.database.close()  # in the same thread

    @serve.method(execution="serial")
    def __call__(self) -> int:
        (count,) = self.database.execute("select count(*) from visits").fetchone()
        self.database.execute("insert into visits values (?)", (count + 1,))
        return int(count) + 1


app = Visits.bind()
