"""Attention between the tokens of a text, with circuitsvis."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from functools import cache, partial
from html import escape
from importlib.resources import files

import numpy as np
from jaxtyping import Float

from sightlens.errors import SightLensError
from sightlens.render.figure import Markup, encoded
from sightlens.render.heat import heat_map
from sightlens.render.style import Labels

LIMIT = 1_000_000
"""Bytes of HTML above which a figure is refused."""

# circuitsvis' own `render` inlines 1.3 MB of script unpacked, asks the network at each display, and does not escape
# tokens. Here the browser unpacks the same script, and the data is JSON that no token can break out of.
_SCRIPT = """
(async () => {
if (!window.CircuitsVis) {
  const bytes = Uint8Array.from(atob("PACKED"), c => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text() + ";window.CircuitsVis = CircuitsVis";
  document.head.append(script);
}
CircuitsVis.render("ID", CircuitsVis.AttentionHeads, PROPS);
})();
"""


def draw_attention(
    tokens: Sequence[str],
    pattern: Float[np.ndarray, "head query key"],
    *,
    names: Sequence[str] | None = None,
    title: str = "Attention",
) -> Markup:
    """Draw attention among text tokens as an interactive figure: a small map per head, one of them large.

    For a text, or for the text part of a sequence. For attention to visual tokens use `browse_values`. As PNG or SVG it
    is the mean over heads.

    Args:
        tokens: of the positions, the same as queries and as keys.
        pattern: attention probabilities.
        names: of the heads; None numbers them.
        title: of the figure.

    Raises:
        SightLensError: when tokens, names and pattern do not fit, or the figure would exceed 1 MB.
    """
    heads, queries, keys = pattern.shape
    names = [f"head {head}" for head in range(heads)] if names is None else list(names)
    if not len(tokens) == queries == keys or len(names) != heads:
        got = f"{len(tokens)} tokens and {len(names)} names for a pattern of {pattern.shape}"
        raise SightLensError("the same tokens as queries and keys, and a name per head", got, "Slice the pattern to these tokens.")
    props = {"attention": np.round(pattern, 3).tolist(), "tokens": list(tokens), "attentionHeadNames": names, "maskUpperTri": True}
    text = json.dumps(props, separators=(",", ":")).replace("<", "\\u003c").replace("0.0,", "0,")
    key = f"sl-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    script = _SCRIPT.replace("ID", key, 1).replace("PACKED", _packed(), 1).replace("PROPS", text, 1)
    fragment = f'<strong>{escape(title)}</strong><div id="{key}" style="background:#fff;color:#1f2430"></div><script>{script}</script>'
    if len(fragment) > LIMIT:
        do = "Take fewer heads or positions, or browse_values for visual tokens."
        raise SightLensError(f"a figure below {LIMIT:,} bytes", f"{len(fragment):,} for a pattern of {pattern.shape}", do)
    labels = Labels(title=f"{title}, mean over {heads} heads", x="key", y="query", colour="attention")
    mean = partial(heat_map, pattern.mean(axis=0), labels=labels, rows=list(tokens), columns=list(tokens))
    return Markup(title, fragment, mean)


@cache
def _packed() -> str:
    """Return circuitsvis' script, compressed."""
    script = (files("circuitsvis") / "dist" / "cdn" / "iife.js").read_bytes()
    return encoded(gzip.compress(script.replace(b"</script>", b""), mtime=0))
