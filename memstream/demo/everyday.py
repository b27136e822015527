"""Small talk about the house, the garden and the road."""

from memstream.demo.frame import Frame, phrases

_COOKING = Frame(
    user=(
        "How can I keep {dish} from turning out {fault} when the {tool} runs too hot?",
        "What goes wrong when {dish} comes out {fault}, even in a good {tool}?",
        "Is there a trick for {dish} so that it is never {fault}, using only a {tool}?",
        "Guests are coming tonight. Can {dish} be made in a {tool} without ending up {fault}?",
    ),
    reply=(
        (
            "Warm the {tool} slowly and add the {thing} only when everything else is ready.",
            "The usual cause is the {thing}: it goes into the {tool} far too early.",
            "Start with less {thing} than you think, and keep the {tool} on a low flame.",
            "Most cooks rush this, so let the {thing} rest beside the {tool} for a while.",
        ),
        (
            "A spoonful of {thing2} also helps, because it stops {dish} from becoming {fault}.",
            "If it still looks {fault}, stir in some {thing2} and wait a few minutes.",
            "With a little {thing2} on top, {dish} stays pleasant until the next day.",
            "Taste it before you add any {thing2}, since {dish} needs very little of it.",
        ),
    ),
    slots={
        "dish": phrases(
            "pea soup, mushroom stew, carrot cake, rice pudding, onion tart, potato gratin, bean chilli, fish pie, "
            "pumpkin curry, apple crumble, leek quiche, vegetable broth, cheese souffle, barley salad, corn bread"
        ),
        "fault": phrases("watery, burnt, bland, lumpy, dry, too salty, bitter, greasy, soggy, tough, grainy, sour"),
        "tool": phrases(
            "frying pan, clay pot, baking tin, pressure cooker, copper saucepan, deep tray, wok, slow cooker, stock "
            "pot, cast iron pan, stone oven, camping stove"
        ),
        "thing": phrases(
            "butter, cream, flour, lemon juice, parsley, garlic, vinegar, sugar, yoghurt, grated cheese, thyme, "
            "nutmeg, stock, breadcrumbs, chopped nuts, honey"
        ),
    },
)

_GARDEN = Frame(
    user=(
        "The {plant} near the {spot} have {sign}. What could be the matter?",
        "Can {plant} grow beside a {spot}, or will they soon have {sign}?",
        "What should be done when {plant} have {sign} and the {spot} is close by?",
        "Why do {plant} so often have {sign} when they stand next to a {spot}?",
    ),
    reply=(
        (
            "That happens when {plant} get too much {cause}, above all in {season}.",
            "Look for {cause} first, because in {season} it is the most likely reason.",
            "It is rarely serious, and in {season} plain {cause} explains most of it.",
            "Too little {cause} weakens {plant}, and {season} only makes it show.",
        ),
        (
            "Spread some {cure} around the {spot} and do not water in the evening.",
            "A thin layer of {cure} keeps {plant} healthy for the rest of the year.",
            "Gardeners often put {cure} between {plant} and the {spot} to prevent this.",
            "Remove the worst leaves, add {cure}, and keep the {spot} free of weeds.",
        ),
    ),
    slots={
        "plant": phrases(
            "tomatoes, beans, courgettes, strawberries, roses, tulips, cabbages, radishes, currant bushes, "
            "sunflowers, lettuces, young apple trees, ferns, peas"
        ),
        "spot": phrases(
            "compost heap, stone wall, wooden shed, pond, gravel path, hedge, greenhouse, rain barrel, terrace, "
            "south side of a house, sandpit, old well"
        ),
        "sign": phrases(
            "yellow leaves, brown spots, curled tips, tiny holes, pale stems, no blossoms, weak roots, sticky buds, "
            "cracked fruit, grey mould, drooping heads"
        ),
        "cause": phrases("shade, water, wind, sun, fertiliser, heat, lime, frost, acid soil, standing moisture"),
        "season": phrases("early spring, late spring, midsummer, a wet summer, early autumn, a mild winter, dry weeks"),
        "cure": phrases(
            "straw, bark chips, coarse sand, leaf mould, ripe compost, wood ash, crushed eggshells, dry grass, "
            "pebbles, coffee grounds, nettle tea"
        ),
    },
)

_HOUSE = Frame(
    user=(
        "What removes {stain} from {surface} without leaving {mark}?",
        "Does {remedy} work on {surface}, or will it leave {mark}?",
        "How should {stain} on {surface} be treated when it is {old}?",
        "Somebody spilled something and now there is {stain} on {surface}. Is {remedy} a good idea?",
    ),
    reply=(
        (
            "Dab {surface} with {remedy} and wait, as rubbing only gives you {mark}.",
            "For {stain} that is {old}, {remedy} is gentler than anything from a shop.",
            "Try {remedy} on a hidden corner first, because {surface} may show {mark}.",
            "As long as it is {old}, {remedy} will lift {stain} in a few minutes.",
        ),
        (
            "If {mark} should appear all the same, {remedy2} makes {surface} even again.",
            "Afterwards wipe {surface} with {remedy2} and let it dry in the open air.",
            "Never mix it with {remedy2}, though, or {stain} will go deeper.",
            "Some people swear by {remedy2}, but on {surface} it works more slowly.",
        ),
    ),
    slots={
        "stain": phrases(
            "red wine, candle wax, ink, rust, coffee, grass stain, soot, chewing gum, beetroot juice, engine oil, "
            "tree sap, lime"
        ),
        "surface": phrases(
            "a wooden table, a wool carpet, linen, a stone floor, a cotton shirt, a glass door, leather, bathroom "
            "tiles, a painted wall, a silk scarf, a steel sink, a marble step"
        ),
        "mark": phrases("a pale ring, scratches, a dark edge, streaks, a dull patch, a sticky film, shiny spots"),
        "remedy": phrases(
            "warm vinegar, baking soda, cold milk, soap flakes, lemon juice, washing powder, salt water, blotting "
            "paper, potato starch, pure alcohol, a damp sponge, chalk"
        ),
        "old": phrases("still fresh, one day old, half dry, years old, dried in, barely visible, already faded"),
    },
)

_COMPUTER = Frame(
    user=(
        "What can be done when the {device} {fault} after {event}?",
        "Is it normal that the {device} {fault} during {event}?",
        "How does one stop the {device} when it {fault} because of {event}?",
        "A friend says that the {device} {fault} whenever there is {event}. Can that be right?",
    ),
    reply=(
        (
            "Unplug the {device}, check {check}, and wait a minute before you switch it on.",
            "Very often the trouble lies with {check} when it {fault}, and not with {event} at all.",
            "After {event}, first look at {check}, which is quickly done with any such thing.",
            "Keep {check} in view: as soon as it {fault}, something there has changed.",
        ),
        (
            "If it still {fault2} tomorrow, note the time and ask the maker of the {device}.",
            "Should it be {check2} in the end, a spare costs little and {event} will do no harm.",
            "Do not open the {device} yourself while it {fault2}, as {check2} can be damaged.",
            "Then compare {check2} with the handbook, in case the {device} soon {fault2} as well.",
        ),
    ),
    slots={
        "device": phrases(
            "old laptop, router, scanner, tablet, wireless keyboard, projector, game console, "
            "smart watch, digital radio, label printer"
        ),
        "fault": phrases(
            "freezes, turns itself off, shows a black screen, gets very hot, loses the signal, blinks, runs slowly, "
            "prints blank pages, beeps twice, forgets the time"
        ),
        "event": phrases(
            "an update, a power cut, a thunderstorm, a long video call, a cold night, a move to another desk, a "
            "fall, a change of battery, heavy use"
        ),
        "check": phrases(
            "the cable, the fan, the free disk space, the plug, the cover, the settings page, the warning lamp, the "
            "fuse, the battery contacts, the antenna"
        ),
    },
)

_BICYCLE = Frame(
    user=(
        "The {part} of a {bike} makes {noise} on {road}. What might cause that?",
        "How often should the {part} of a {bike} be checked when it is used on {road}?",
        "Is it safe to ride a {bike} over {road} if the {part} makes {noise}?",
        "Which tool is needed to adjust the {part} of a {bike} that makes {noise}?",
    ),
    reply=(
        (
            "Clean the {part} with {agent} first, since {road} covers it in grit.",
            "Most of the time {agent} on the {part} is all that a {bike} needs.",
            "On a {bike} it is often the {part2} that makes {noise}, not the {part}.",
            "Loosen the {part}, wipe it with {agent}, and tighten it again by hand.",
        ),
        (
            "If you still hear {noise}, look at the {part2} as well before riding on {road}.",
            "A worn {part2} gives the same signs, so turn the {bike} over and compare.",
            "After a long ride over {road}, the {part2} deserves the same care.",
            "Should the {part2} feel loose too, let a workshop see the {bike}.",
        ),
    ),
    slots={
        "part": phrases(
            "chain, rear hub, saddle post, left pedal, front brake, gear cable, headset, crank, bottom bracket, "
            "rim, derailleur, freewheel, luggage rack"
        ),
        "bike": phrases(
            "road bike, folding bike, tandem, mountain bike, cargo bike, city bike, racing bike, touring bike"
        ),
        "noise": phrases(
            "a clicking sound, a dull knock, a high squeak, a grinding noise, a rattle, a humming sound, a scraping "
            "noise"
        ),
        "road": phrases(
            "cobbles, wet leaves, gravel, forest tracks, steep hills, sandy paths, rough asphalt, snow, tram rails"
        ),
        "agent": phrases(
            "light oil, warm soapy water, dry wax, a soft cloth, some grease, a stiff brush, thin solvent"
        ),
    },
)

_TRAVEL = Frame(
    user=(
        "What should go into a bag for {days} at {goal} when travelling by {means}?",
        "Is {days} long enough to see {goal} if one comes by {means}?",
        "Which is better for reaching {goal} with {company}, {means} or {means2}?",
        "How do people plan {days} at {goal} with {company} without getting tired?",
    ),
    reply=(
        (
            "For {days} you hardly need more than {item} and {item2}.",
            "Most visitors to {goal} forget {item}, although {days} without it can feel long.",
            "Going by {means} leaves room for {item}, which helps a great deal at {goal}.",
            "With {company}, put {item} on top of the bag and {item2} at the bottom.",
        ),
        (
            "Arrive {when}, because {goal} is far quieter then, even with {company}.",
            "Tickets for the {means2} are cheaper {when}, so it pays to ask.",
            "Keep one afternoon free {when}, since {goal} always takes longer than planned.",
            "Book nothing {when}; with {company} it is nicer to stay flexible.",
        ),
    ),
    slots={
        "days": phrases("a weekend, three days, one week, two nights, a long day, ten days, a few hours, half a week"),
        "goal": phrases(
            "a harbour town, a national park, a quiet island, an old monastery, a lake in the hills, a famous "
            "canyon, a market square, a fishing village, a spa, a castle by a river, the edge of a glacier"
        ),
        "means": phrases("night train, ferry, coach, camper, hired car, cable car, sleeper, bus, river boat"),
        "company": phrases(
            "small children, a large group, elderly relatives, a choir, two friends, a school class, a guide"
        ),
        "item": phrases(
            "a water bottle, a light scarf, ear plugs, a paper map, sun cream, dry socks, a torch, a penknife, a "
            "book, some cash, a rain jacket, a first aid kit, a deck of cards"
        ),
        "when": phrases(
            "early in the week, before breakfast, after the school holidays, on market day, late at night, out of "
            "season, at lunch time, around sunset"
        ),
    },
)

FRAMES = (
    _COOKING,
    _GARDEN,
    _HOUSE,
    _COMPUTER,
    _BICYCLE,
    _TRAVEL,
)
