//! CIDEr-D (Vedantam et al., 2015) of captions with several references each, on whitespace tokens.

use std::collections::{HashMap, HashSet};

const ORDERS: usize = 4;
/// The width of the penalty of a difference in length.
const SIGMA: f64 = 6.0;

/// The numbers of each n-gram, for every n.
type Counts<'a> = [HashMap<Vec<&'a str>, f64>; ORDERS];

/// The n-grams of a text, weighted by how rare they are, with the norms of the weights.
struct Vector<'a> {
    weights: Counts<'a>,
    norms: [f64; ORDERS],
    /// The number of bigrams, as the evaluation of COCO counts.
    length: f64,
}

/// Returns the mean CIDEr-D of captions, each with its references; usually from 0 to about 10, COCO's tables have it
/// times 100. The rarity of an n-gram is that in the references given.
pub fn cider_d(captions: &[(&str, Vec<&str>)]) -> f64 {
    let references: Vec<Vec<Counts>> =
        captions.iter().map(|(_, references)| references.iter().map(|text| counts(text)).collect()).collect();
    let mut frequencies = HashMap::<&[&str], f64>::new();
    for image in &references {
        let grams: HashSet<&[&str]> = image.iter().flatten().flat_map(HashMap::keys).map(Vec::as_slice).collect();
        grams.into_iter().for_each(|gram| *frequencies.entry(gram).or_default() += 1.0);
    }
    let images = (captions.len() as f64).ln();
    let rarity = |gram: &[&str]| images - frequencies.get(gram).map_or(0.0, |frequency| frequency.ln());
    let scores = captions.iter().zip(&references).map(|((caption, _), references)| {
        let caption = vector(&counts(caption), &rarity);
        let each = references.iter().map(|reference| similarity(&caption, &vector(reference, &rarity)));
        10.0 * each.sum::<f64>() / references.len().max(1) as f64
    });
    scores.sum::<f64>() / captions.len().max(1) as f64
}

fn counts(text: &str) -> Counts<'_> {
    let words: Vec<&str> = text.split_whitespace().collect();
    std::array::from_fn(|i| {
        let mut counts = HashMap::new();
        words.windows(i + 1).for_each(|gram| *counts.entry(gram.to_vec()).or_default() += 1.0);
        counts
    })
}

fn vector<'a>(counts: &Counts<'a>, rarity: &impl Fn(&[&str]) -> f64) -> Vector<'a> {
    let length = counts[1].values().sum();
    let weights = counts.clone().map(|mut counts| {
        counts.iter_mut().for_each(|(gram, count)| *count *= rarity(gram));
        counts
    });
    let norms = weights.each_ref().map(|weights| weights.values().map(|weight| weight * weight).sum::<f64>().sqrt());
    Vector { weights, norms, length }
}

/// Returns the mean over n of the cosines, where a caption's n-gram weighs no more than the reference's, with the
/// penalty.
fn similarity(caption: &Vector, reference: &Vector) -> f64 {
    let cosine = |i: usize| {
        let reference_weight = |gram: &Vec<&str>| reference.weights[i].get(gram).copied().unwrap_or(0.0);
        let weights = caption.weights[i].iter().map(|(gram, &weight)| (weight, reference_weight(gram)));
        let product: f64 = weights.map(|(weight, other)| weight.min(other) * other).sum();
        match caption.norms[i] * reference.norms[i] {
            0.0 => product,
            norms => product / norms,
        }
    };
    let difference = caption.length - reference.length;
    let penalty = (-difference * difference / (2.0 * SIGMA * SIGMA)).exp();
    penalty * (0..ORDERS).map(cosine).sum::<f64>() / ORDERS as f64
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) const CAPTIONS: [(&str, [&str; 3]); 4] = [
        (
            "a big red circle is to the left of two small squares",
            [
                "a big red circle is left of two small blue squares",
                "two little boxes with a large crimson disc on their left",
                "there is a circle to the left of two squares",
            ],
        ),
        (
            "three three three rings above a cross",
            ["three rings above a cross", "a cross with three hoops over it", "three black rings are over a plus"],
        ),
        (
            "a picture of a ring",
            [
                "a white ring",
                "we see a pale ring and nothing else but the grey background",
                "the picture shows only a ring",
            ],
        ),
        ("nothing of this", ["a square inside a circle", "a circle around a square", "a box in the middle of a disc"]),
    ];

    pub(crate) fn captions(range: std::ops::Range<usize>) -> Vec<(&'static str, Vec<&'static str>)> {
        CAPTIONS[range].iter().map(|(caption, references)| (*caption, references.to_vec())).collect()
    }

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-12, "{found}, expected {expected}");
    }

    /// The values of pycocoevalcap 1.2, for dictionaries of lists by image: `Cider().compute_score(references,
    /// captions)`.
    #[test]
    fn cider_d_equals_that_of_coco() {
        close(cider_d(&captions(0..4)), 1.878851992634841);
        close(cider_d(&captions(0..3)), 2.445124609346929);
        close(cider_d(&captions(0..2)), 3.13442316996706);
    }
}
