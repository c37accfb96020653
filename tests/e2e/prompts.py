"""Forty greedy prompts: several languages, lengths around block and chunk borders, shared prefixes, both endpoints."""

from __future__ import annotations

from tests.e2e.ask import Endpoint, Prompt

TEXTS = {
    "english": "The lighthouse keeper wrote down the time of every ship that passed, and at the end of the year he "
    "counted them, because somebody in the city had once asked him how many there were. ",
    "german": "Der Leuchtturmwärter schrieb die Uhrzeit jedes vorbeifahrenden Schiffes auf, und am Ende des Jahres "
    "zählte er sie, weil ihn jemand aus der Stadt einmal danach gefragt hatte. ",
    "french": "Le gardien du phare notait l'heure de chaque navire qui passait, et à la fin de l'année il les "
    "comptait, car quelqu'un de la ville le lui avait demandé un jour. ",
    "greek": "Ο φαροφύλακας σημείωνε την ώρα κάθε πλοίου που περνούσε, και στο τέλος του χρόνου τα μετρούσε. ",
    "chinese": "灯塔看守人记下每一艘驶过的船的时间，到了年底他就数一数，因为城里有人曾经问过他一共有多少艘。",
    "arabic": "كان حارس المنارة يدون وقت كل سفينة تمر، وفي نهاية العام كان يعدها. ",
    "hindi": "प्रकाशस्तंभ का रखवाला हर गुज़रते जहाज़ का समय लिखता था, और साल के अंत में उन्हें गिनता था। ",
    "emoji and code": "def count(ships: list[str]) -> int:  # 🚢🚢🚢\n    return len(ships)  # 👩‍🚀 naïve\n",
}
LENGTHS = (1, 31, 32, 33, 64, 65, 255, 256, 257, 700)
"""In tokens: a block is 32, a scheduler step 256."""


def build(endpoint: Endpoint) -> list[Prompt]:
    """All forty. `endpoint` is asked for token ids."""
    ids = endpoint.token_ids(" ".join(TEXTS.values()) * 3)
    prompts = [Prompt(f"{n} tokens", "completion", {"prompt": ids[:n]}, stream=n % 2 == 0) for n in LENGTHS]
    for number, (language, text) in enumerate(TEXTS.items()):
        stream = number % 2 == 0
        prompts.append(Prompt(f"{language} completion", "completion", {"prompt": text * 2}, stream=stream))
        prompts.append(Prompt(f"{language} chat", "chat", _chat(text), stream=not stream))
    shared = " ".join(TEXTS.values())
    for number in range(8):
        question = f"Question {number}: what did the keeper count, and why?"
        prompts.append(
            Prompt(f"shared prefix {number}", "chat", _chat(question, system=shared), stream=number % 2 == 1)
        )
    for number in range(6):
        turns = [
            turn
            for n in range(number + 1)
            for turn in (
                {"role": "user", "content": f"Turn {n}: {TEXTS['english']}"},
                {"role": "assistant", "content": f"Answer {n}: {TEXTS['german']}"},
            )
        ]
        body = {"messages": [*turns, {"role": "user", "content": "And then?"}]}
        prompts.append(Prompt(f"conversation of {number + 2} turns", "chat", body, stream=number % 2 == 0))
    assert len(prompts) == 40
    return prompts


def _chat(text: str, system: str = "You answer in one sentence.") -> dict[str, object]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}]}
