"""Words around the concepts: what queries and foreign sentences look like.

Everything is put together from lower-case templates with one ``{}`` for a list of concept names. Templates say
nothing about which concepts they carry, so a retriever has to read the names.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PICTURE = ("a picture of {}", "an image that shows {}", "a drawing with {}")
CLIP = ("a video of {}", "a clip that shows {}", "a short film with {}")
MOVING = "{name} moving {direction}"
PAGE = (
    "a page titled {title} listing {}",
    "the {title} page with entries for {}",
    "a price list called {title} with {}",
)

WORD = {
    "en": "the word {}",
    "de": "das wort {}",
    "fr": "le mot {}",
    "es": "la palabra {}",
    "it": "la parola {}",
    "pt": "a palavra {}",
}
AND = {"en": "and", "de": "und", "fr": "et", "es": "y", "it": "e", "pt": "e"}

SENTENCES = {
    "en": (
        "on the old market square you can buy {} until late in the evening",
        "my sister packed {} into a box before the long journey",
        "the museum by the river shows {} in its large hall",
        "yesterday the children drew {} on the wall of our house",
        "the parcel that came this morning contains {} and nothing else",
        "in the story that grandmother told us there were {} under a tree",
    ),
    "de": (
        "auf dem alten marktplatz kann man bis zum späten abend {} kaufen",
        "meine schwester hat vor der langen reise {} in eine kiste gepackt",
        "das museum am fluss zeigt in seinem großen saal {}",
        "gestern haben die kinder {} an die wand unseres hauses gemalt",
        "das paket von heute morgen enthält {} und sonst nichts",
        "in der geschichte der großmutter lagen {} unter einem baum",
    ),
    "fr": (
        "sur la vieille place du marché on peut acheter {} jusque tard le soir",
        "ma sœur a rangé {} dans une caisse avant le long voyage",
        "le musée au bord du fleuve montre {} dans sa grande salle",
        "hier les enfants ont dessiné {} sur le mur de notre maison",
        "le colis arrivé ce matin contient {} et rien d'autre",
        "dans l'histoire de grand mère il y avait {} sous un arbre",
    ),
    "es": (
        "en la vieja plaza del mercado se puede comprar {} hasta la noche",
        "mi hermana guardó {} en una caja antes del largo viaje",
        "el museo junto al río muestra {} en su gran sala",
        "ayer los niños dibujaron {} en la pared de nuestra casa",
        "el paquete que llegó esta mañana contiene {} y nada más",
        "en el cuento de la abuela había {} debajo de un árbol",
    ),
    "it": (
        "nella vecchia piazza del mercato si può comprare {} fino a sera",
        "mia sorella ha messo {} in una cassa prima del lungo viaggio",
        "il museo vicino al fiume mostra {} nella sua grande sala",
        "ieri i bambini hanno disegnato {} sul muro della nostra casa",
        "il pacco arrivato stamattina contiene {} e nient'altro",
        "nella storia della nonna c'erano {} sotto un albero",
    ),
    "pt": (
        "na velha praça do mercado pode se comprar {} até tarde da noite",
        "a minha irmã guardou {} numa caixa antes da longa viagem",
        "o museu junto ao rio mostra {} na sua grande sala",
        "ontem as crianças desenharam {} na parede da nossa casa",
        "o pacote que chegou esta manhã contém {} e mais nada",
        "na história da avó havia {} debaixo de uma árvore",
    ),
}


def pick(rng: np.random.Generator, choices: Sequence[str]) -> str:
    """One of ``choices``, uniformly."""
    return choices[int(rng.integers(len(choices)))]


def enumerate_names(names: Sequence[str], language: str = "en") -> str:
    """``a``, ``a and b``, ``a, b and c`` with the language's own conjunction."""
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} {AND[language]} {names[-1]}"
