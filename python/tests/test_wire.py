"""The connection and the error replies."""

import os
import socket
import threading
import unittest

import support  # noqa: F401

from autokernel import wire


class Wire(unittest.TestCase):
    def test_requests_replies_descriptors(self):
        ours, theirs = socket.socketpair()

        def handle(body, descriptors):
            if body.get("fail"):
                raise wire.RequestError("no_model", "nothing there", module="m")
            return {"sum": sum(body["numbers"]), "fds": len(descriptors)}

        def stop(_body, _descriptors):
            raise wire.Stop({"bye": True})

        server = threading.Thread(target=wire.serve, args=(wire.Connection(theirs), {"add": handle, "stop": stop}))
        server.start()
        client = wire.Connection(ours)
        read, write = os.pipe()
        socket.send_fds(ours, [b'{"id":1,"op":"add","numbers":[1,2]}\n{"id":2,'], [read])
        ours.sendall(b'"op":"add","numbers":[]}\n')
        self.assertEqual(client.receive()[0], {"id": 1, "ok": {"sum": 3, "fds": 1}})
        self.assertEqual(client.receive()[0], {"id": 2, "ok": {"sum": 0, "fds": 0}})
        client.send({"id": 3, "op": "add", "fail": True})
        error = client.receive()[0]["error"]
        self.assertEqual((error["kind"], error["message"], error["module"]), ("no_model", "nothing there", "m"))
        client.send({"id": 4, "op": "nothing"})
        self.assertEqual(client.receive()[0]["error"]["kind"], "unknown_op")
        client.send({"id": 5, "op": "stop"})
        self.assertEqual(client.receive()[0], {"id": 5, "ok": {"bye": True}})
        server.join(5)
        os.close(read)
        os.close(write)
        client.close()
        theirs.close()


if __name__ == "__main__":
    unittest.main()
