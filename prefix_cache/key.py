"""The namespace of a tree: everything but the tokens that decides the contents of a page."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Namespace:
    """Tagged fields, compared as values, never glued into one string.

    model_digest, numeric_mode, kv_dtype and adapter decide the bits of a page; tenant comes from
    the credential, salt from the request, and both only narrow.
    """

    model_digest: str
    numeric_mode: str
    kv_dtype: str
    tenant: str
    salt: str = ""
    adapter: str = ""
