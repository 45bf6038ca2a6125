"""The words that names and values are made of: many more than the dozen databases of this example use.

The tiny policy is warmed up on random schemas of these words, so it has to copy names from its prompt.
"""

from __future__ import annotations

_NOUNS = """
account acre address age airline angle animal answer apple area arena artist author award bakery balance ball bank
barrel basket battery beer bench board boat book bottle box brake branch brand breed brick bridge brush budget
builder bus cable cake camp candle canteen captain car cargo castle cat chair choir city coach coat code colour
concert contract cook country course court cover cow crew crop cross crowd curve customer dance dealer depth diet
director discount distance district doctor door dress driver duration duty eagle egg event expert fabric family
farm fashion fee festival film flag floor foot forest frame gear genre glass goal gold grain grape guard guitar
hall harbour harvest heat height hill hobby home horse host hour house income industry inn insect iron island item
judge juice label lamp land layer leaf lecture length lens letter level licence lion list loan lock lunch manager
map mark mass meal metal mile mill mine model moment month motor mountain museum name nation nature neck novel
number ocean offer organ origin output oven owner package page palace panel patient pay pen period phase phone
picture pitch plan plane planet plant player poet point population position post power premium price product
province pupil queen race range rank ratio region review ride river roof room rope rule salary sample sand scale
scene score sea seat section seller series shelf shift ship shirt show signal singer skill sky song speaker speed
sport spot stadium staff star status store story stream street subject suit summer surface symbol target task
teacher team temple term text theatre ticket tile timber title topic tour tower town trail trip truck tunnel tutor
type version vessel vineyard violin visit visitor volume vote wage wagon wall wave weapon weight wheel width wind
window wine winner wood wool worker writer year zone
"""
NOUNS = tuple(_NOUNS.split())

UNITS = ("kg", "lb", "km", "cm", "usd", "eur", "sec", "min", "pct", "qty", "max", "net")
"""Units of numbers: `weight_kg` in one schema is `weight_lb` in another."""

SUFFIXES = ("name", "code", "text")
"""Names that a text column may have besides its word: `city_name`."""

KEYS = ("id", "no", "key", "ref")
"""How a schema calls its keys: `singer_id`, `singer_no`."""

_VALUES = """
place: Athens Austin Boston Dallas Delhi Havana India Japan Madrid Milan Norway Rome Tokyo Vienna
person: Adams Baker Costa Davis Gomez Harris Irwin Jones Meyer Owens Smith Turner Walker Zhang
colour: Black Blue Brown Golden Green Grey Orange Pink Purple Red Silver Violet
kind: Alpha Delta Final Gamma Heavy Light Local Modern Prime Quiet Rural Solid South West
"""
VALUES = {kind: tuple(texts.split()) for kind, texts in (line.split(": ") for line in _VALUES.strip().splitlines())}
