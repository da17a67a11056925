"""A server as far as who starts it on Spark sees it: ``… spark_child JOB INDEX SPEC``.

It asks for a certificate, tells the address that it was given, says "joined" to each
description of its cluster, and ends with its input, or where its port is port 7.
Imports nothing of ours, so that it starts at once.
"""

import json
import sys

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def main(job: str, spec: str) -> int:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = builder.sign(key, hashes.SHA256())
    pem = request.public_bytes(serialization.Encoding.PEM)
    say(json.dumps({"request": pem.decode()}))
    certificate = json.loads(sys.stdin.readline())
    (address,) = json.loads(spec)[job]
    if address.endswith(":7"):
        sys.stderr.write("the port is taken\n")
        return 3
    sys.stderr.write(f"{sorted(certificate)}\n")
    say(json.dumps({"address": f"{address.rpartition(':')[0]}:7"}))
    for _ in sys.stdin:
        say("joined")
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[3]))
