//! This grammar has what can be said of a scene, with synonyms, omissions and different orders.

use crate::phrase::Phrase::{self, All, One, Words};
use crate::scene::{Group, Relation, Scene, COLORS};

/// Returns all captions of a scene, with their probabilities.
pub(crate) fn captions(scene: &Scene) -> Phrase {
    let first = || noun_phrase(scene.first);
    let is = Words(if scene.first.count == 1 { "is" } else { "are" });
    let Some((relation, second)) = scene.other else {
        return One(vec![
            (2.0, first()),
            (2.0, All(vec![first(), Phrase::any("alone|and nothing else|on a grey background|in the picture")])),
            (2.0, All(vec![Phrase::any("there"), is, Phrase::any("|only|just"), first()])),
            (2.0, All(vec![showing(), first()])),
        ]);
    };
    let other = || noun_phrase(second);
    let other_is = Words(if second.count == 1 { "is" } else { "are" });
    let its = Words(if second.count == 1 { "its" } else { "their" });
    let its_first = Words(if scene.first.count == 1 { "its" } else { "their" });
    let Places { before, after, at_first, at_second, both } = Places::new(relation);
    let mut ways = vec![
        (3.0, All(vec![first(), One(vec![(1.0, is.clone()), (1.0, Words(""))]), before.clone(), other()])),
        (2.0, All(vec![other(), One(vec![(1.0, other_is), (1.0, Words(""))]), after, first()])),
        (1.0, All(vec![Words("there"), is.clone(), first(), before.clone(), other()])),
        (1.0, All(vec![showing(), first(), before, other()])),
    ];
    match relation {
        Relation::Inside => ways.push((2.0, All(vec![other(), Words("with"), first(), at_first]))),
        _ => {
            ways.push((1.5, All(vec![other(), Words("with"), first(), Words("on"), its, at_first.clone()])));
            ways.push((1.0, All(vec![first(), Words("with"), other(), Words("on"), its_first, at_second.clone()])));
            ways.push((1.0, All(vec![first(), Words("and"), other(), both])));
            let second_part = vec![Phrase::any("and|while"), Words("on the"), at_second];
            let part = vec![Words("on the"), at_first, is, first(), All(second_part)];
            ways.push((1.0, All(part.into_iter().chain([other()]).collect())));
        }
    }
    One(ways)
}

fn showing() -> Phrase {
    Phrase::any("we see|you can see|the picture shows|a picture of|this shows")
}

/// A relation is expressed by these phrases.
struct Places {
    /// The words between the first group and the second.
    before: Phrase,
    /// The words between the second group and the first.
    after: Phrase,
    /// The place of the first group.
    at_first: Phrase,
    /// The place of the second group.
    at_second: Phrase,
    /// The words after both groups.
    both: Phrase,
}

impl Places {
    fn new(relation: Relation) -> Self {
        let any = Phrase::any;
        match relation {
            Relation::LeftOf => Places {
                before: any("to the left of|left of|on the left side of"),
                after: any("to the right of|right of|on the right side of"),
                at_first: any("left|left side"),
                at_second: any("right|right side"),
                both: any("next to each other|side by side|in a row"),
            },
            Relation::Above => Places {
                before: any("above|over|higher than"),
                after: any("below|under|beneath|lower than"),
                at_first: any("top|upper side"),
                at_second: any("bottom|lower side"),
                both: any("one above the other|from top to bottom"),
            },
            Relation::Inside => Places {
                before: any("inside|within|in the middle of|in"),
                after: any("around|surrounding|behind"),
                at_first: any("inside|in the middle|within"),
                at_second: Words(""),
                both: Words(""),
            },
        }
    }
}

/// Returns a group: number, size and colour before the noun, or the colour after it; or without a size or a colour.
fn noun_phrase(group: Group) -> Phrase {
    let number = match group.count {
        1 => One(vec![(4.0, Words("a")), (1.0, Words("one")), (1.0, Words("a single"))]),
        2 => One(vec![(3.0, Words("two")), (1.0, Words("a pair of"))]),
        _ => One(vec![(3.0, Words("three")), (1.0, Words("a group of three")), (1.0, Words("some"))]),
    };
    let size = Phrase::any(if group.is_big { "big|large|huge" } else { "small|little|tiny" });
    let size = One(vec![(3.0, size), (2.0, Words(""))]);
    let (usual, others, _) = COLORS[group.color];
    let color = words(usual, others);
    let (usual, others) = NOUNS[group.shape as usize][usize::from(group.count > 1)];
    let noun = words(usual, others);
    let which = Words(if group.count > 1 { "that are" } else { "that is" });
    let after = All(vec![noun.clone(), One(vec![(1.0, which), (1.0, Words("in"))]), color.clone()]);
    One(vec![
        (6.0, All(vec![number.clone(), size.clone(), color, noun.clone()])),
        (2.0, All(vec![number.clone(), size.clone(), after])),
        (1.0, All(vec![number, size, noun])),
    ])
}

/// Returns the usual word twice as often as the others.
fn words(usual: &'static str, others: &'static str) -> Phrase {
    let others: Vec<_> = others.split('|').map(|word| (1.0, Words(word))).collect();
    One([(2.0, Words(usual))].into_iter().chain(others).collect())
}

/// The usual word for each shape, and others: for one, and for several.
const NOUNS: [[(&str, &str); 2]; 5] = [
    [("circle", "disc|dot|ball"), ("circles", "discs|dots|balls")],
    [("square", "box|block"), ("squares", "boxes|blocks")],
    [("triangle", "wedge|pyramid"), ("triangles", "wedges|pyramids")],
    [("cross", "plus|plus sign"), ("crosses", "pluses|plus signs")],
    [("ring", "hoop|loop"), ("rings", "hoops|loops")],
];

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{rngs::StdRng, SeedableRng};

    const COLOR_WORDS: [&str; 8] = [
        "red crimson scarlet",
        "green jade",
        "blue navy cobalt",
        "yellow golden",
        "purple violet plum",
        "pink rose",
        "black dark jet-black",
        "white pale",
    ];
    const SHAPES: [&str; 5] = [
        "circle circles disc discs dot dots ball balls",
        "square squares box boxes block blocks",
        "triangle triangles wedge wedges pyramid pyramids",
        "cross crosses plus pluses",
        "ring rings hoop hoops loop loops",
    ];
    /// Words that turn a relation round, whatever the order of the groups.
    const TURNED: [&str; 3] = ["right", "below under beneath lower bottom", "around surrounding behind"];

    fn index(lists: &[&str], word: &str) -> Option<usize> {
        lists.iter().position(|list| list.split_whitespace().any(|other| other == word))
    }

    /// Words alone show which groups a caption has, in which order, and how they lie.
    #[test]
    fn every_caption_is_true_of_its_scene() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut orders = [0; 2];
        for _ in 0..3000 {
            let scene = Scene::draw(false, &mut rng);
            if scene.other.is_some_and(|(_, second)| second.shape == scene.first.shape) {
                continue; // the shapes do not show the order
            }
            let caption = captions(&scene).write(&mut rng);
            let caption = caption.replace("one above the other", "other"); // no number
            let words: Vec<&str> = caption.split_whitespace().collect();
            let shapes: Vec<usize> = words.iter().filter_map(|word| index(&SHAPES, word)).collect();
            let colors: Vec<usize> = words.iter().filter_map(|word| index(&COLOR_WORDS, word)).collect();
            let groups: Vec<Group> = scene.groups().collect();
            let expected: Vec<usize> = groups.iter().map(|group| group.shape as usize).collect();
            let is_turned = shapes != expected;
            let groups: Vec<Group> = if is_turned { groups.into_iter().rev().collect() } else { groups };
            assert_eq!(shapes, groups.iter().map(|group| group.shape as usize).collect::<Vec<_>>(), "{caption}");
            let group_colors: Vec<usize> = groups.iter().map(|group| group.color).collect();
            assert!(colors.iter().all(|color| group_colors.contains(color)), "{caption}");
            if colors.len() == groups.len() {
                assert_eq!(colors, group_colors, "{caption}");
            }
            let has = |text: &str| words.iter().any(|word| text.split_whitespace().any(|other| other == *word));
            for (text, count) in [("one single", 1), ("two pair", 2), ("three some", 3)] {
                assert!(!has(text) || groups.iter().any(|group| group.count == count), "{caption}");
            }
            for (text, is_big) in [("big large huge", true), ("small little tiny", false)] {
                assert!(!has(text) || groups.iter().any(|group| group.is_big == is_big), "{caption}");
            }
            // "X right of Y" has the second group first; "X with Y on its right" and "on the left X" have the first.
            let Some((relation, _)) = scene.other else { continue };
            let is_direct =
                !["with", "other", "top"].iter().any(|word| words.contains(word)) && words[..2] != ["on", "the"];
            if is_direct {
                assert_eq!(has(TURNED[relation as usize]), is_turned, "{caption}");
                orders[usize::from(is_turned)] += 1;
            }
        }
        assert!(orders.iter().all(|&count| count > 200), "{orders:?}");
    }
}
