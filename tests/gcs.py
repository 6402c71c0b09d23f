"""Google Cloud Storage on this machine: an object store in memory, for real clients.

The parts of the JSON API that TensorFlow's and TensorStore's own clients use. TensorFlow
knows no other address than Google's, and speaks TLS: it comes through a proxy that
answers in Google's place, with a certificate that it is told to trust.
"""

import contextlib
import dataclasses
import http.server
import json
import os
import socket
import ssl
import subprocess
import threading
import urllib.parse

HOSTS = ("www.googleapis.com", "storage.googleapis.com")


class Store:
    """The objects of all buckets, generation and content by name; all that were written."""

    def __init__(self):
        self.objects: dict[str, tuple[int, bytes]] = {}
        self.history: list[str] = []
        self.uploads: dict[str, str] = {}
        self.lock = threading.Lock()
        self.generation = 0

    def put(self, name, content):
        self.generation += 1
        self.history.append(name)
        self.objects[name] = (self.generation, content)

    def describe(self, name):
        generation, content = self.objects[name]
        return {
            "name": name.partition("/")[2],
            "size": str(len(content)),
            "generation": str(generation),
            "updated": "2026-01-01T00:00:00.000Z",
        }

    def listing(self, bucket, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, prefixes = [], {}
        for name in sorted(self.objects):
            if not name.startswith(f"{bucket}/{prefix}"):
                continue
            short = name.partition("/")[2]
            if not query.get("startOffset", "") <= short < query.get("endOffset", "~"):
                continue
            head, found, _ = short[len(prefix) :].partition(delimiter or "\0")
            if found:
                prefixes[prefix + head + delimiter] = None
            else:
                items.append(self.describe(name))
        return {"items": items, "prefixes": list(prefixes)}


def handler(store: Store):
    """The request handler of one store."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, status, content=b"", **headers):
            if not isinstance(content, bytes):
                content = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)

        def handle_one(self):
            body = self.body()
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            parts = url.path.split("/")
            with store.lock:
                if parts[1] == "upload":
                    self.upload(parts[5], query, body)
                elif parts[1] == "session":
                    self.uploaded(parts[2], body)
                elif parts[1:3] == ["storage", "v1"]:
                    self.api([urllib.parse.unquote(p) for p in parts[4:]], query)
                else:
                    self.download(urllib.parse.unquote(url.path[1:]))

        do_GET = do_POST = do_PUT = do_DELETE = handle_one

        def body(self):
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def failed_condition(self, name, query):
            now = str(store.objects.get(name, (0,))[0])
            if query.get("ifGenerationMatch", now) != now:
                return 412
            return 304 if query.get("ifGenerationNotMatch") == now != "0" else 0

        def upload(self, bucket, query, body):
            name = f"{bucket}/{query['name']}"
            if status := self.failed_condition(name, query):
                self.answer(status, {})
            elif query["uploadType"] == "resumable":
                store.uploads[str(len(store.uploads))] = name
                where = f"https://{HOSTS[0]}/session/{len(store.uploads) - 1}"
                self.answer(200, Location=where)
            else:
                store.put(name, body)
                self.answer(200, store.describe(name))

        def uploaded(self, number, body):
            store.put(store.uploads[number], body)
            self.answer(200, store.describe(store.uploads[number]))

        def api(self, parts, query):
            bucket, name = parts[0], f"{parts[0]}/{parts[2] if parts[2:] else ''}"
            if len(parts) == 1:
                self.answer(200, {"name": bucket, "location": "US"})
            elif len(parts) == 2:
                self.answer(200, store.listing(bucket, query))
            elif name not in store.objects:
                self.answer(404, {"error": {"code": 404, "message": name}})
            elif status := self.failed_condition(name, query):
                self.answer(status, {})
            elif "rewriteTo" in parts or "copyTo" in parts:
                store.put(f"{parts[5]}/{parts[7]}", store.objects[name][1])
                resource = store.describe(f"{parts[5]}/{parts[7]}")
                self.answer(200, {"done": True, "resource": resource})
            elif self.command == "DELETE":
                del store.objects[name]
                self.answer(204)
            elif query.get("alt") == "media":
                self.download(name)
            else:
                self.answer(200, store.describe(name))

        def download(self, name):
            if name not in store.objects:
                self.answer(404)
                return
            generation, content = store.objects[name]
            headers = {"x_goog_generation": str(generation)}
            wanted = self.headers.get("Range")
            if not wanted:
                self.answer(200, content, **headers)
                return
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin = int(first) if first else max(len(content) - int(last), 0)
            end = min(int(last) + 1 if first and last else len(content), len(content))
            if begin >= len(content):
                self.answer(416)
                return
            headers["Content_Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            self.answer(206, content[begin:end], **headers)

    return Handler


def _pipe(source, sink):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class _Proxy(threading.Thread):
    """Answers `CONNECT` to any host with the store, behind TLS."""

    def __init__(self, context, port):
        super().__init__(daemon=True)
        self._context, self._port = context, port
        self.listener = socket.create_server(("localhost", 0))

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(
                    target=self._serve, args=(client,), daemon=True
                ).start()

    def _serve(self, client):
        head = b""
        while b"\r\n\r\n" not in head:
            head += client.recv(4096)
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(OSError))
            inside = stack.enter_context(
                self._context.wrap_socket(client, server_side=True)
            )
            store = stack.enter_context(
                socket.create_connection(("localhost", self._port))
            )
            back = threading.Thread(target=_pipe, args=(inside, store), daemon=True)
            back.start()
            _pipe(store, inside)
            back.join()


@dataclasses.dataclass(frozen=True)
class Running:
    """A store, and the environment in which clients find it."""

    store: Store
    environment: dict[str, str]

    def run(self, repository, folder, *command):
        """What a command printed that ended well, with the clients of this store."""
        paths = os.pathsep.join([str(repository), str(repository / "tests")])
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | self.environment | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done


@contextlib.contextmanager
def running(folder):
    """A store that runs; its certificate is made in `folder`."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = ",".join(f"DNS:{host}" for host in HOSTS)
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-keyout",
            key,
            "-out",
            certificate,
            "-subj",
            f"/CN={HOSTS[0]}",
            "-addext",
            f"subjectAltName={names}",
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    store = Store()
    server = http.server.ThreadingHTTPServer(("localhost", 0), handler(store))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = _Proxy(context, server.server_address[1])
    proxy.start()
    environment = {
        "https_proxy": f"http://localhost:{proxy.listener.getsockname()[1]}",
        "no_proxy": "",
        "CURL_CA_BUNDLE": str(certificate),
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
        "NO_GCE_CHECK": "true",
        "TENSORSTORE_GCS_HTTP_URL": f"http://localhost:{server.server_address[1]}",
    }
    try:
        yield Running(store, environment)
    finally:
        proxy.listener.close()
        server.shutdown()
        server.server_close()
