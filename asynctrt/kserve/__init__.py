"""KServe's V2 inference protocol as bytes, for servers and for clients: no sockets, no waiting.

``datatypes`` maps tensors to their wire form, ``codec`` holds what requests have in common in every encoding,
``json_codec`` and ``protobuf`` are the two encodings on the server's side, and ``client`` is the other side.
``inference.proto`` and ``health.proto`` describe the messages over gRPC.
"""
