//! The built-in text: sentences of a small grammar, with agreement in number, reported speech and arithmetic. Words are
//! drawn by Zipf's law.

use rand::{rngs::StdRng, Rng, SeedableRng};

/// The least number of characters of the text, which has whole sentences.
const LENGTH: usize = 150_000;
const SEED: u64 = 1711;

const NAMES: &[&str] = &["Ada", "Boris", "Clara", "Dmitri", "Emil", "Frida", "Gustav", "Hedy", "Igor", "Judith"];
const NOUNS: &[&str] = &[
    "river", "lamp", "garden", "wolf", "letter", "captain", "stone", "window", "baker", "cloud", "engine", "mirror",
    "queen", "violin", "harbour", "thief", "orchard", "needle", "glacier", "juggler",
];
const ADJECTIVES: &[&str] = &["old", "quiet", "green", "broken", "distant", "clever", "frozen", "golden", "lazy"];
const VERBS: &[&str] =
    &["follow", "paint", "forget", "admire", "repair", "question", "borrow", "haunt", "measure", "sketch", "surround"];
const PLACES: &[&str] = &["near the bridge", "in the north", "behind the mill", "at sea", "under the oak", "by night"];
const REPORTS: &[&str] = &["says", "thinks", "denies", "expects", "writes"];

/// Returns the same text in every run.
pub(crate) fn built_in() -> String {
    let mut writer = Writer(StdRng::seed_from_u64(SEED));
    let mut text = String::new();
    while text.len() < LENGTH {
        text += &writer.sentence();
        text.push(if writer.with(0.2) { '\n' } else { ' ' });
    }
    text
}

struct Writer(StdRng);

impl Writer {
    fn with(&mut self, probability: f64) -> bool {
        self.0.random::<f64>() < probability
    }

    /// Draws a word. The word of rank r has a probability proportional to 1 / r.
    fn word(&mut self, words: &[&'static str]) -> &'static str {
        let total: f64 = (1..=words.len()).map(|rank| 1.0 / rank as f64).sum();
        let mut left = self.0.random::<f64>() * total;
        let found = words.iter().zip(1..).find(|(_, rank)| {
            left -= 1.0 / f64::from(*rank);
            left <= 0.0
        });
        found.map_or(words[0], |(word, _)| *word)
    }

    fn sentence(&mut self) -> String {
        match self.0.random_range(0..10) {
            0 => self.sum(),
            1 | 2 => format!("{} {}: \"{}.\"", self.word(NAMES), self.word(REPORTS), self.clause()),
            3 => format!("{} {} that {}.", self.word(NAMES), self.word(REPORTS), self.clause()),
            _ => {
                let clause = self.clause();
                clause[..1].to_uppercase() + &clause[1..] + "."
            }
        }
    }

    /// Returns a sum of two numbers of up to two digits.
    fn sum(&mut self) -> String {
        let (a, b) = (self.0.random_range(0..60u32), self.0.random_range(0..60u32));
        format!("{a} and {b} are {}.", a + b)
    }

    /// Makes a clause of a subject, a verb that agrees with it in number, an object, and at times a place.
    fn clause(&mut self) -> String {
        let is_subject_plural = self.with(0.4);
        let verb = self.word(VERBS).to_owned() + if is_subject_plural { "" } else { "s" };
        let is_object_plural = self.with(0.5);
        let (subject, object) = (self.noun_phrase(is_subject_plural), self.noun_phrase(is_object_plural));
        let place = if self.with(0.3) { format!(" {}", self.word(PLACES)) } else { String::new() };
        format!("{subject} {verb} {object}{place}")
    }

    fn noun_phrase(&mut self, plural: bool) -> String {
        let article = match (plural, self.with(0.5)) {
            (_, true) => "the",
            (true, false) => "many",
            (false, false) => "one",
        };
        let adjective = if self.with(0.4) { format!("{} ", self.word(ADJECTIVES)) } else { String::new() };
        let noun = self.word(NOUNS);
        let noun = match (plural, noun) {
            (false, _) => noun.to_owned(),
            (true, "wolf") => "wolves".into(),
            (true, "thief") => "thieves".into(),
            (true, _) => noun.to_owned() + "s",
        };
        format!("{article} {adjective}{noun}")
    }
}
