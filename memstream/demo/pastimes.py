"""Small talk about games, books, music, the sky and the past."""

from memstream.demo.frame import Frame, phrases

_CHESS = Frame(
    user=(
        "In chess, is it wise to {plan} while the {piece} is still {state}?",
        "What is the best answer in chess when somebody tries to {plan} although the {piece} is {state}?",
        "Why do strong chess players {plan} so early and leave the {piece} {state}?",
        "Does it pay to {plan} in the {phase}, or should the {piece} be moved first?",
    ),
    reply=(
        (
            "It depends on the {phase}, but a {piece} that is {state} usually tells you to wait.",
            "In the {phase} it can work, provided that the other {piece} is not {state}.",
            "Many coaches advise against it in the {phase}, because a {state} {piece} invites trouble.",
            "Count the attackers first: in the {phase}, a {state} {piece} loses more games than blunders.",
        ),
        (
            "If you {plan2} beforehand, the {piece} becomes much safer.",
            "A calmer choice is to {plan2}, and only then to {plan}.",
            "Try to {plan2} in a few friendly games and watch what the {piece} does.",
            "Remember that whoever manages to {plan2} decides the {phase}.",
        ),
    ),
    slots={
        "plan": phrases(
            "attack on the queenside, trade queens, push the outer pawns, castle, open the centre, double the "
            "rooks, give up a pawn, block the long diagonal, occupy the open file, force a draw, hunt the king, "
            "keep the tension"
        ),
        "piece": phrases(
            "rook, knight, bishop, queen, king, passed pawn, dark bishop, second knight, outer rook, pawn chain"
        ),
        "state": phrases(
            "undefended, badly placed, pinned, trapped, idle, blocked, overworked, exposed, cornered, unprotected"
        ),
        "phase": phrases("opening, middle game, endgame, first ten moves, time scramble, quiet phase, final attack"),
    },
)

_STARS = Frame(
    user=(
        "Can {object} be seen with {device} from {place}, or is the {trouble} too strong?",
        "When is the best time to look at {object} from {place} using {device}?",
        "Why does {object} look so faint through {device}, even from {place}?",
        "What should a beginner with {device} look for near {object} if there is some {trouble}?",
    ),
    reply=(
        (
            "Choose {time}, since {object} then stands high above the {trouble}.",
            "With {device} you will find it best at {time}, if the {trouble} is not too bad.",
            "From {place} it works at {time}, as soon as your eyes have got used to the dark.",
            "At {time} even {device} will show {object} as a small soft patch of light.",
        ),
        (
            "Next to it you may also spot {object2}, which needs no more than {device}.",
            "After that, turn slowly towards {object2}, a far easier target in spite of the {trouble}.",
            "People compare it with {object2}, but from {place} the two look quite different.",
            "Sketch what you see and come back to {object2} on a night without any {trouble}.",
        ),
    ),
    slots={
        "object": phrases(
            "Saturn, the Orion nebula, the Andromeda galaxy, Jupiter, the Pleiades, Venus, a comet, the double star "
            "Albireo, the Milky Way, Mars, the Hyades, Vega, the crater Copernicus, the north star"
        ),
        "device": phrases(
            "field glasses, a small telescope, the naked eye, an old spyglass, a borrowed refractor, a cheap "
            "viewfinder, a mirror telescope, a phone camera"
        ),
        "place": phrases(
            "a balcony, a dark valley, the edge of a village, a mountain hut, a beach, a city park, a hilltop, an "
            "open field, a forest clearing"
        ),
        "trouble": phrases("moonlight, haze, street light, mist, glare, dust in the air, thin cloud, smoke"),
        "time": phrases(
            "midnight, the hour before dawn, new moon, late evening in winter, the end of twilight, two hours after "
            "sunset, the darkest hour"
        ),
    },
)

_WEATHER = Frame(
    user=(
        "Why is there so often {weather} over {land} in {month}?",
        "Is {sign} really a sign that {weather} will come, or is that only true in {land}?",
        "How do forecasters know that {weather} will reach {land} after {sign}?",
        "What is the difference between {weather} and {weather2} over {land}?",
    ),
    reply=(
        (
            "Air that has crossed {land} is {air}, and in {month} this favours {weather}.",
            "In {month} the wind brings {air} air, which turns into {weather} over {land}.",
            "When {air} air meets {land}, you get {weather}, most of all in {month}.",
            "Sailors knew that {sign} and {air} air go before {weather}.",
        ),
        (
            "By contrast, {weather2} forms where the ground is {ground}, so you seldom see both.",
            "If the ground is {ground}, the same air may bring {weather2} in its place.",
            "Models still find {weather2} hard to predict when the ground is {ground}.",
            "A day later, {weather2} may follow if the ground stays {ground}.",
        ),
    ),
    slots={
        "weather": phrases(
            "fog, hail, drizzle, freezing rain, a thunderstorm, a warm wind, hoar frost, heavy snow, a dust storm, "
            "steady rain, a sea breeze, a heat wave, sleet"
        ),
        "land": phrases(
            "a coast, a wide plain, a high plateau, a river valley, an island, a large lake, a desert, moorland, a "
            "range of hills, a big city, pine forest"
        ),
        "month": phrases(
            "the last days of autumn, the middle of winter, the first warm weeks, the rainy season, high summer, "
            "the short days of the year, early spring"
        ),
        "sign": phrases(
            "a ring around the moon, a red evening sky, low flying swallows, a falling barometer, a veil of cloud, "
            "a sudden calm, distant thunder, a green horizon"
        ),
        "air": phrases("cold, damp, dry, unstable, warm, heavy, still, salty"),
        "ground": phrases("cold, wet, bare, frozen, covered in snow, dry, warm from the day before, marshy"),
    },
)

_HISTORY = Frame(
    user=(
        "How did {people} manage to {deed} without {lack}?",
        "Is it true that {people} used to {deed} during {age}?",
        "Why was {thing} so important for {people} in {age}?",
        "What do we know about the way {people} would {deed} with {thing}?",
    ),
    reply=(
        (
            "Letters from {age} suggest that {people} relied on {thing} and a lot of patience.",
            "Historians of {age} think that {people} learned it from traders who sold {thing}.",
            "There was no {lack} in {age}, so {thing} had to do the same work.",
            "For {people}, {thing} was costly, and only the richest could {deed} with ease.",
        ),
        (
            "Only later, when {lack} came into use, did people {deed2} instead.",
            "Some digs show that they would also {deed2}, although nobody had {lack} yet.",
            "One chronicle even says that they would {deed2} before each winter, with {thing2} at hand.",
            "It changed when {thing2} became cheap and everybody began to {deed2}.",
        ),
    ),
    slots={
        "people": phrases(
            "Roman soldiers, monks, Viking sailors, medieval farmers, Egyptian scribes, silk traders, Greek "
            "potters' guilds, mountain shepherds, early printers, court musicians, whalers, pilgrims"
        ),
        "deed": phrases(
            "cross a desert, store grain, measure time, send messages, build bridges, dye wool, find north, cure a "
            "fever, keep accounts, carry heavy stones, light a street, preserve fish"
        ),
        "lack": phrases(
            "paper money, iron tools, clocks, maps, glass windows, printed books, good roads, gunpowder, compasses"
        ),
        "age": phrases(
            "the bronze age, the late middle ages, the time of the crusades, the first empires, the age of sail, "
            "the years after the great plague, the Renaissance, the early steam age"
        ),
        "thing": phrases(
            "salt, timber, parchment, olive wood, wool, copper, wax, rope, clay, beeswax, silver, leather, flax"
        ),
    },
)

_READING = Frame(
    user=(
        "Can you suggest {genre} about {theme} that is {tone}?",
        "Why are readers of {genre} so fond of {theme}?",
        "How does a writer make {theme} sound {tone} in {genre}?",
        "Is {genre} about {theme} a good choice for {reader}?",
    ),
    reply=(
        (
            "Look for {genre} that opens with {scene}, since {theme} then feels {tone}.",
            "For {reader}, {theme} works best when the first chapter shows {scene}.",
            "The good ones keep {theme} in the background and let {scene} carry the plot.",
            "Many librarians would hand {reader} {genre} with {scene} on the first page.",
        ),
        (
            "Something with {theme2} would suit {reader} too, if it should be {tone}.",
            "If {theme} grows tiresome, {theme2} is close to it and often more {tone}.",
            "Later you could move on to {theme2}, which many find surprisingly {tone}.",
            "Stories of {theme2} usually end with {scene2}, so they read in quite another way.",
        ),
    ),
    slots={
        "genre": phrases(
            "a short novel, a detective story, a fairy tale, a stage play, a travel diary, a ghost story, a long "
            "poem, a comic book, a sea story, a fable"
        ),
        "theme": phrases(
            "a lost letter, a family quarrel, life in a lighthouse, a stolen painting, a strange neighbour, a long "
            "winter, a journey on foot, a failed invention, a secret garden, a village baker, a travelling circus, "
            "a shipwreck"
        ),
        "tone": phrases("funny, gloomy, tender, tense, dreamy, honest, wild, quiet, puzzling, hopeful"),
        "reader": phrases(
            "a tired commuter, a teenager, a book club, somebody on a plane, a slow reader, a patient in bed, a "
            "curious child"
        ),
        "scene": phrases(
            "a knock at the door, an empty station, a broken mirror, a crowded dinner, a storm at night, a missing "
            "key, a wedding, an old photograph, a footprint, a farewell on a pier"
        ),
    },
)

_MUSIC = Frame(
    user=(
        "How long does it take {learner} to play {music} on {instrument}?",
        "What should {learner} practise when {trouble} while playing {music}?",
        "Why does {instrument} sound so {sound} in {music}?",
        "Is {instrument} a good start for {learner} who wants to play {music}?",
    ),
    reply=(
        (
            "Play {music} at half speed until {instrument} no longer sounds {sound}.",
            "It helps {learner} to hum {music} first and to pick up {instrument} only afterwards.",
            "When {trouble}, stop at once and let {instrument} rest for a moment.",
            "The room matters: {instrument} turns {sound} where the ceiling is low, whatever {learner} does.",
        ),
        (
            "A few minutes of {music2} each morning are worth more than an hour of {music}.",
            "Teachers give {learner} some {music2} for exactly that reason.",
            "Once {music2} goes well, the feeling that {trouble} will soon be gone.",
            "Choose {music2} for a week, above all if {instrument} seems {sound}.",
        ),
    ),
    slots={
        "learner": phrases(
            "a beginner, an adult, a child, a left handed player, a singer, an impatient pupil, a retired person"
        ),
        "music": phrases(
            "slow waltzes, folk songs, simple scales, marches, jazz standards, church hymns, film music, ragtime, "
            "lullabies, dance tunes, short studies, old ballads"
        ),
        "instrument": phrases(
            "the cello, the guitar, the recorder, the trumpet, the ukulele, the flute, the banjo, the clarinet, the "
            "violin, the mandolin, the church organ"
        ),
        "trouble": phrases(
            "the fingers get stiff, the rhythm slips, the high notes crack, the breath runs out, the wrist hurts, "
            "the left hand lags behind, the strings buzz"
        ),
        "sound": phrases("thin, harsh, muffled, shrill, hollow, nasal, sleepy, sharp"),
    },
)

FRAMES = (
    _CHESS,
    _STARS,
    _WEATHER,
    _HISTORY,
    _READING,
    _MUSIC,
)
