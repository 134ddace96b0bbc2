"""What each position of a sequence is: layouts, token sets, and the selector language that names positions.

Pure data over numpy: no model and no tensor library.
"""

from sightlens.layout.builder import build_layout, mark_ids
from sightlens.layout.indices import Span
from sightlens.layout.layout import Layout
from sightlens.layout.parser import parse
from sightlens.layout.segments import ROLES, Item, Padding, Role, Segment, Separator, Special, Text, Visual
from sightlens.layout.selector import Both, Either, Not, Random, Register, Reshape, Selector, Top, Translate, Word, walk
from sightlens.layout.sheets import Sheet
from sightlens.layout.structure import VISUAL_TOKEN, Features, Structure
from sightlens.layout.tokenset import TokenSet
from sightlens.layout.views import View, ViewKind
from sightlens.layout.words import WORDS

__all__ = [
    "ROLES",
    "VISUAL_TOKEN",
    "WORDS",
    "Both",
    "Either",
    "Features",
    "Item",
    "Layout",
    "Not",
    "Padding",
    "Random",
    "Register",
    "Reshape",
    "Role",
    "Segment",
    "Selector",
    "Separator",
    "Sheet",
    "Span",
    "Special",
    "Structure",
    "Text",
    "TokenSet",
    "Top",
    "Translate",
    "View",
    "ViewKind",
    "Visual",
    "Word",
    "build_layout",
    "mark_ids",
    "parse",
    "walk",
]
