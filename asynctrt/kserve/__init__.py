"""KServe's V2 inference protocol as bytes, for servers and for clients, without I/O.

``datatypes`` maps tensors to their wire form, ``codec`` holds what all encodings of requests have in common,
``json_codec`` and ``protobuf`` are the two encodings on the server's side, and ``client`` is the client's
side. ``inference.proto`` and ``health.proto`` describe the messages over gRPC.
"""
