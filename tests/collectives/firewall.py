"""Firewall of a simulated host."""

from __future__ import annotations

from tests.hosts import Hosts


def drop_tcp(hosts: Hosts, host: int, but: int = 0) -> None:
    """Drop TCP packets that a host sends, but those to a port: by a queue of no packets, for want of nftables."""
    shape = [
        "qdisc add dev eth0 root handle 1: htb default 10 r2q 100000",
        "class add dev eth0 parent 1: classid 1:10 htb rate 10gbit",
        "class add dev eth0 parent 1: classid 1:20 htb rate 10gbit",
        "qdisc add dev eth0 parent 1:20 pfifo limit 0",
        f"filter add dev eth0 parent 1: protocol ip prio 1 u32 match ip dport {but} 0xffff flowid 1:10",
        "filter add dev eth0 parent 1: protocol ip prio 2 u32 match ip protocol 6 0xff flowid 1:20",
    ]
    for words in shape:
        hosts.run(host, ["tc", *words.split()])
