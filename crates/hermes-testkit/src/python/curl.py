"""curl, as its own library: one easy handle after the other, or one for all.

In: on standard input a JSON object: ca, resolve, perhaps cert and key, and `ask`, a list of objects: url, version
(`3` is HTTP/3 alone), perhaps method, headers, body (its size), alt_svc. Out: on standard output a JSON list: status,
the version that was spoken, fields, and a digest of the body.
"""

import hashlib
import io
import json
import sys

import pycurl

VERSIONS = {"1.1": 2, "2": 4, "3": 31, "any": 0}
SPOKEN = {1: "1.0", 2: "1.1", 3: "2", 30: "3"}
# Options that the binding has no names for: CURLOPT_ALTSVC_CTRL with h1, h2 and h3.
ALTSVC_CTRL, ALTSVC_ALL = 286, (1 << 3) | (1 << 4) | (1 << 5)
HTTP_VERSION_SPOKEN = 0x200000 + 46


def ask(handle, task, one):
    body, fields = io.BytesIO(), []
    handle.setopt(pycurl.URL, one["url"])
    handle.setopt(pycurl.CAINFO, task["ca"])
    handle.setopt(pycurl.RESOLVE, task["resolve"])
    handle.setopt(pycurl.HTTP_VERSION, VERSIONS[one["version"]])
    handle.setopt(pycurl.TIMEOUT, 30)
    handle.setopt(pycurl.WRITEDATA, body)
    handle.setopt(pycurl.HEADERFUNCTION, lambda line: fields.append(line.decode().strip()))
    handle.setopt(pycurl.HTTPHEADER, one.get("headers", []))
    if one.get("alt_svc"):
        handle.setopt(ALTSVC_CTRL, ALTSVC_ALL)
        # Else the connection that is there would do.
        handle.setopt(pycurl.FRESH_CONNECT, 1)
    if task.get("cert"):
        handle.setopt(pycurl.SSLCERT, task["cert"])
        handle.setopt(pycurl.SSLKEY, task["key"])
    sent = b"0123456789abcdef" * (one.get("body", 0) // 16 + 1)
    sent = sent[: one.get("body", 0)]
    if "body" in one:
        handle.setopt(pycurl.POST, 1)
        handle.setopt(pycurl.POSTFIELDSIZE_LARGE, len(sent))
        handle.setopt(pycurl.READDATA, io.BytesIO(sent))
    elif one.get("method"):
        handle.setopt(pycurl.CUSTOMREQUEST, one["method"])
    try:
        handle.perform()
    except pycurl.error as error:
        return {"error": str(error)}
    came = body.getvalue()
    return {
        "status": handle.getinfo(pycurl.RESPONSE_CODE),
        "version": SPOKEN.get(handle.getinfo(HTTP_VERSION_SPOKEN), "?"),
        "fields": fields,
        "bytes": len(came),
        "same": came == sent,
        "text": came[:2000].decode("utf-8", "replace"),
        "digest": hashlib.sha256(came).hexdigest(),
    }


def main():
    task, results = json.load(sys.stdin), []
    handle = pycurl.Curl()
    for one in task["ask"]:
        results.append(ask(handle, task, one))
        if not one.get("alt_svc"):
            handle.reset()
    json.dump(results, sys.stdout)


main()
