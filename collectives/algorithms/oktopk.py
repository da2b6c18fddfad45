"""oktopk: the exact top-k of the sum of all picks, at a cost that hardly grows with P.

Li and Hoefler 2022 ("Near-optimal sparse allreduce", PPoPP), section 3; each rank is a circle of

    split       every rank sends each region's picks to the region's owner        P - 1 messages
    reduce      the owner adds them up, in rank order: its region's sums are exact
    threshold   all learn how many of each region's sums are in the update        2 or 3 allgathers
    balance     owners with more than their share send the surplus on             few messages
    gather      everyone gets everyone's share                                    an allgather

Words of 4 bytes that a rank sends, an entry being two: at most 2 k for the split, 2 k (P-1)/P where
a rank's picks spread evenly; 2 k_out (P-1)/P each to balance and to gather. So 6 k (P-1)/P for
k_out = k, besides headers (64 bytes a message), the threshold's samples (under 0.7 KB a rank and
round) and, in a step that draws new boundaries, 8 P quantiles of each rank.

A pick is in the update, with all others of its index, or returns to its owner: the paper's rule
loses nothing here.
"""

from __future__ import annotations
