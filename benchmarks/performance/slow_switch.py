"""An Ethernet switch that delays every frame, for kernels without the scheduler netem.

    ip netns exec HUB python benchmarks/performance/slow_switch.py --delay-ms 25 p1 p2 p3

It learns which address is behind which port and floods frames to unknown addresses. The ports' own queues (rate, drops)
come after the delay. ``hosts.py`` starts one; it needs root and, at 100 Mbit/s, one core.
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
"""Large enough that frames queue in the link, not in the socket: 800 ms at 100 Mbit/s and more."""
SIOCETHTOOL, OFFLOADS = 0x8946, (0x17, 0x1F, 0x24)
"""ETHTOOL_STXCSUM, STSO, SGSO leave checksums and segments to hardware, which virtual links do not have."""
BATCH = 64


def disable_offloads(device: str) -> None:
    """Let a device send complete frames with checksums, so that they can be forwarded unchanged."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for feature in OFFLOADS:
            value = array.array("I", [feature, 0])
            fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP", device.encode(), value.buffer_info()[0]))


def open_port(device: str) -> socket.socket:
    """Return a raw socket for all frames of a device."""
    port_socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port_socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port_socket.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    port_socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port_socket.bind((device, 0))
    port_socket.setblocking(False)
    return port_socket


class Switch:
    """Ports, the addresses behind them, and a queue of delayed frames."""

    def __init__(self, ports: list[socket.socket], delay_s: float):
        self.ports, self.delay_s = ports, delay_s
        self.ports_by_address: dict[bytes, socket.socket] = {}
        self.queue: deque[tuple[float, socket.socket, bytes]] = deque()
        self.selector = selectors.DefaultSelector()
        for port_socket in ports:
            self.selector.register(port_socket, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            idle = max(self.queue[0][0] - time.monotonic(), 0) if self.queue else None
            for key, _ in self.selector.select(idle):
                self.receive(key.fileobj)  # type: ignore[arg-type]
            while self.queue and self.queue[0][0] <= time.monotonic():
                self.forward(*self.queue.popleft()[1:])

    def receive(self, port_socket: socket.socket) -> None:
        with suppress(BlockingIOError):
            for _ in range(BATCH):
                frame = port_socket.recv(2**16)
                self.ports_by_address[frame[6:12]] = port_socket
                self.queue.append((time.monotonic() + self.delay_s, port_socket, frame))

    def forward(self, source: socket.socket, frame: bytes) -> None:
        destination = self.ports_by_address.get(frame[:6])
        for out in [destination] if destination else self.ports:
            if out is not source:
                # A frame for a full queue is dropped, as on any link.
                with suppress(BlockingIOError, OSError):
                    out.send(frame)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ports", nargs="+", help="devices of this network namespace")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="delay of each frame")
    parser.add_argument("--prepare", action="store_true", help="only disable offloads of the devices, for a host")
    arguments = parser.parse_args()
    for device in arguments.ports:
        disable_offloads(device)
    if not arguments.prepare:
        Switch([open_port(device) for device in arguments.ports], arguments.delay_ms / 1000).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
