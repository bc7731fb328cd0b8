"""Decode many requests at once, with any target and drafter that follow peagle.protocols.

Start reading at naive.py (the algorithm), step/step.py (one step on the device) and host/engine.py (the loop). Rooms
import only their own files and those of lower rooms:

    devices     engines on several devices, in several processes
    host        schedule, send, collect
    step        one step on the device              memory      pages of keys and values
    request.py  a request, its grammar, the settings
    auto        how many tokens to draft
"""
