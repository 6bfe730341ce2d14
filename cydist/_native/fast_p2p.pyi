from typing import Any

def send(tensor: Any, dst: object, group: object, tag: object) -> int: ...
def recv(tensor: Any, src: object, group: object, tag: object) -> int: ...

__test__: dict[str, str]
__pyx_capi__: dict[str, Any]
