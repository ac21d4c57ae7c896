"""An Ethernet switch that holds every frame for a while: a delay on links, for kernels without the scheduler netem.

    ip netns exec HUB python benchmarks/slow_switch.py --delay-ms 25 p1 p2 p3

Learns which address is behind which port, as a switch does, and floods what it does not know. The ports' own queues
(their rate, their drops) come after it. ``benchmarks/hosts.py`` starts one; it needs root and one core at 100 Mbit/s.
"""

from __future__ import annotations

import argparse
import array
import fcntl
import selectors
import socket
import struct
import sys
import time
from collections import deque
from contextlib import suppress

ETH_P_ALL = 0x0003
SOL_PACKET, PACKET_IGNORE_OUTGOING = 263, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BUFFER_BYTES = 64 * 2**20
"""A port's queue is the link's, not the socket's: 800 ms at 100 Mbit/s and more."""
SIOCETHTOOL, OFFLOADS = 0x8946, (0x17, 0x1F, 0x24)
"""ETHTOOL_STXCSUM, STSO, SGSO: what leaves checksums and segments to hardware that is not there."""
BATCH = 64


def without_offloads(device: str) -> None:
    """Let a device of this namespace send whole frames with their checksums, so that they can be forwarded as they are."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for feature in OFFLOADS:
            value = array.array("I", [feature, 0])
            fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP", device.encode(), value.buffer_info()[0]))


def port(device: str) -> socket.socket:
    """All frames that come in at a device, and a way out of it."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    opened.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    opened.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    opened.bind((device, 0))
    opened.setblocking(False)
    return opened


class Switch:
    """Ports, what is known of who is behind them, and the frames that wait: first in, first out."""

    def __init__(self, ports: list[socket.socket], delay_s: float):
        self.ports, self.delay_s = ports, delay_s
        self.behind: dict[bytes, socket.socket] = {}
        self.waiting: deque[tuple[float, socket.socket, bytes]] = deque()
        self.ready = selectors.DefaultSelector()
        for opened in ports:
            self.ready.register(opened, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            idle = max(self.waiting[0][0] - time.monotonic(), 0) if self.waiting else None
            for key, _ in self.ready.select(idle):
                self.take(key.fileobj)  # type: ignore[arg-type]
            while self.waiting and self.waiting[0][0] <= time.monotonic():
                self.forward(*self.waiting.popleft()[1:])

    def take(self, opened: socket.socket) -> None:
        with suppress(BlockingIOError):
            for _ in range(BATCH):
                frame = opened.recv(2**16)
                self.behind[frame[6:12]] = opened
                self.waiting.append((time.monotonic() + self.delay_s, opened, frame))

    def forward(self, came_from: socket.socket, frame: bytes) -> None:
        known = self.behind.get(frame[:6])
        for out in [known] if known else self.ports:
            if out is not came_from:
                with suppress(BlockingIOError, OSError):  # the port's queue is full: dropped, as on any link
                    out.send(frame)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ports", nargs="+", help="devices of this network namespace")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="each frame waits so long")
    parser.add_argument("--prepare", action="store_true", help="of a host: let its devices send whole frames, and end")
    arguments = parser.parse_args()
    for device in arguments.ports:
        without_offloads(device)
    if not arguments.prepare:
        Switch([port(device) for device in arguments.ports], arguments.delay_ms / 1000).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
