//! Random scenes of a few shapes, and their pictures.

use rand::seq::SliceRandom;
use rand::{rngs::StdRng, Rng};

/// The width and the height of a picture, in pixels.
pub(crate) const SIDE: usize = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Circle,
    Square,
    Triangle,
    Cross,
    Ring,
}

impl Shape {
    const ALL: [Shape; 5] = [Shape::Circle, Shape::Square, Shape::Triangle, Shape::Cross, Shape::Ring];
}

/// The colours: the usual word for each, others, and its red, green and blue.
pub(crate) const COLORS: [(&str, &str, [u8; 3]); 8] = [
    ("red", "crimson|scarlet", [210, 30, 35]),
    ("green", "jade", [40, 150, 60]),
    ("blue", "navy|cobalt", [35, 70, 200]),
    ("yellow", "golden", [235, 205, 40]),
    ("purple", "violet|plum", [115, 35, 140]),
    ("pink", "rose", [245, 140, 185]),
    ("black", "dark|jet-black", [25, 25, 25]),
    ("white", "pale", [240, 240, 240]),
];

/// A group is one to three equal objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) count: usize,
    pub(crate) is_big: bool,
    /// The place among the colours.
    pub(crate) color: usize,
    pub(crate) shape: Shape,
}

/// Where the first group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Relation {
    LeftOf,
    Above,
    Inside,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scene {
    pub(crate) first: Group,
    /// The relation to another group, if there is one.
    pub(crate) other: Option<(Relation, Group)>,
}

impl Group {
    fn draw(rng: &mut StdRng) -> Self {
        Self {
            count: rng.random_range(1..=3),
            is_big: rng.random(),
            color: rng.random_range(0..COLORS.len()),
            shape: Shape::ALL[rng.random_range(0..Shape::ALL.len())],
        }
    }

    /// Returns whether no picture for training has this shape in this colour.
    fn is_held_out(self) -> bool {
        self.color == self.shape as usize + 1
    }
}

impl Scene {
    /// Returns a scene; all colours of a scene are different. With `held_out`, a group has a shape in a colour that no
    /// scene without it has.
    pub(crate) fn draw(held_out: bool, rng: &mut StdRng) -> Self {
        loop {
            let (mut first, mut second) = (Group::draw(rng), Group::draw(rng));
            let relation = match rng.random_range(0..6) {
                0 => None,
                1 => {
                    (first.count, first.is_big) = (1, false);
                    (second.count, second.is_big) = (1, true);
                    Some(Relation::Inside)
                }
                2 | 3 => Some(Relation::LeftOf),
                _ => Some(Relation::Above),
            };
            let scene = Self { first, other: relation.map(|relation| (relation, second)) };
            let is_clear = scene.other.is_none_or(|(_, second)| second.color != first.color);
            if scene.is_new() == held_out && is_clear {
                return scene;
            }
        }
    }

    /// Returns whether it shows a shape in a colour that no picture for training has.
    pub(crate) fn is_new(&self) -> bool {
        self.groups().any(Group::is_held_out)
    }

    pub(crate) fn groups(&self) -> impl Iterator<Item = Group> {
        std::iter::once(self.first).chain(self.other.map(|(_, group)| group))
    }

    /// Returns a picture: the red, green and blue of each pixel, row by row. Places, sizes, colours and the background
    /// vary.
    pub(crate) fn picture(&self, rng: &mut StdRng) -> Vec<u8> {
        let mut canvas = Canvas::new(rng);
        let side = SIDE as f64;
        let half = side / 2.0;
        match self.other {
            None => canvas.place(self.first, [0.0, 0.0, side, side], rng),
            Some((Relation::LeftOf, right)) => {
                canvas.place(self.first, [0.0, 0.0, half, side], rng);
                canvas.place(right, [half, 0.0, side, side], rng);
            }
            Some((Relation::Above, below)) => {
                canvas.place(self.first, [0.0, 0.0, side, half], rng);
                canvas.place(below, [0.0, half, side, side], rng);
            }
            Some((Relation::Inside, around)) => {
                let radius = rng.random_range(13.0..17.0);
                let middle = [0; 2].map(|_| half + rng.random_range(-2.0..2.0));
                canvas.fill(around, middle, radius, rng);
                canvas.fill(self.first, inner(around.shape, middle, radius), small(rng), rng);
            }
        }
        canvas.noisy(rng)
    }
}

/// Returns where a small object lies within a large shape.
fn inner(shape: Shape, [x, y]: [f64; 2], radius: f64) -> [f64; 2] {
    match shape {
        Shape::Triangle => [x, y + 0.3 * radius],
        _ => [x, y],
    }
}

fn small(rng: &mut StdRng) -> f64 {
    rng.random_range(2.6..3.4)
}

struct Canvas {
    pixels: Vec<[f64; 3]>,
}

impl Canvas {
    /// Returns a grey background.
    fn new(rng: &mut StdRng) -> Self {
        let grey = rng.random_range(120.0..170.0);
        Self { pixels: vec![[grey; 3]; SIDE * SIDE] }
    }

    /// Draws the objects of a group within left, top, right and bottom, in random slots along the longer side.
    fn place(&mut self, group: Group, [left, top, right, bottom]: [f64; 4], rng: &mut StdRng) {
        let (width, height) = (right - left, bottom - top);
        let is_wide = if width == height { rng.random() } else { width > height };
        let mut slots: Vec<f64> = (0..group.count).map(|slot| slot as f64).collect();
        slots.shuffle(rng);
        for slot in slots {
            let radius = if group.is_big { rng.random_range(5.2..6.2) } else { small(rng) };
            let count = group.count as f64;
            let (slot_width, slot_height) = if is_wide { (width / count, height) } else { (width, height / count) };
            let mut within = |start: f64, length: f64| {
                let free = (length - 2.0 * radius - 1.0).max(0.0);
                start + (length - free) / 2.0 + free * rng.random::<f64>()
            };
            let x = within(left + if is_wide { slot * slot_width } else { 0.0 }, slot_width);
            let y = within(top + if is_wide { 0.0 } else { slot * slot_height }, slot_height);
            self.fill(group, [x, y], radius, rng);
        }
    }

    /// Fills a shape around a middle, with the colour a little lighter or darker.
    fn fill(&mut self, group: Group, [x, y]: [f64; 2], radius: f64, rng: &mut StdRng) {
        let lightness = rng.random_range(-12.0..12.0);
        let color = COLORS[group.color].2.map(|channel| f64::from(channel) + lightness);
        for (i, pixel) in self.pixels.iter_mut().enumerate() {
            let [dx, dy] = [(i % SIDE) as f64 + 0.5 - x, (i / SIDE) as f64 + 0.5 - y];
            if covers(group.shape, dx / radius, dy / radius) {
                *pixel = color;
            }
        }
    }

    /// Returns the pixels, each with a noise of its own.
    fn noisy(self, rng: &mut StdRng) -> Vec<u8> {
        let channels = self.pixels.into_iter().flatten();
        channels.map(|channel| (channel + rng.random_range(-10.0..10.0)).clamp(0.0, 255.0) as u8).collect()
    }
}

/// Returns whether a shape of radius 1 around 0 covers a point; y grows downwards.
fn covers(shape: Shape, x: f64, y: f64) -> bool {
    let distance = x.hypot(y);
    match shape {
        Shape::Circle => distance <= 1.0,
        Shape::Square => x.abs().max(y.abs()) <= 0.9,
        Shape::Triangle => y <= 0.9 && 2.0 * x.abs() <= y + 1.1,
        Shape::Cross => x.abs().max(y.abs()) <= 1.0 && x.abs().min(y.abs()) <= 0.3,
        Shape::Ring => (0.55..=1.0).contains(&distance),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn a_seed_fixes_the_scene_and_its_picture() {
        let drawn = |seed| {
            let mut rng = StdRng::seed_from_u64(seed);
            let scene = Scene::draw(false, &mut rng);
            (scene, scene.picture(&mut rng))
        };
        assert_eq!(drawn(5), drawn(5));
        assert_ne!(drawn(5).1, drawn(6).1);
        let mut rng = StdRng::seed_from_u64(1);
        let scene = Scene::draw(true, &mut rng);
        assert!(scene.is_new());
        assert_ne!(scene.picture(&mut rng), scene.picture(&mut rng), "pictures of a scene differ");
        assert!((0..500).all(|_| !Scene::draw(false, &mut rng).is_new()));
    }

    /// Returns the mean place of the pixels that are closer to this colour than to grey or to any other, and their
    /// number.
    fn seen(picture: &[u8], color: usize) -> ([f64; 2], usize) {
        let distance = |pixel: &[u8], other: [u8; 3]| -> f64 {
            pixel.iter().zip(other).map(|(&a, b)| (f64::from(a) - f64::from(b)).powi(2)).sum()
        };
        let (mut sum, mut count) = ([0.0; 2], 0);
        for (i, pixel) in picture.chunks(3).enumerate() {
            let own = distance(pixel, COLORS[color].2);
            let others = (0..COLORS.len()).filter(|&other| other != color).map(|other| COLORS[other].2);
            if others.chain([[145; 3]]).all(|other| own < distance(pixel, other)) {
                count += 1;
                sum = [sum[0] + (i % SIDE) as f64, sum[1] + (i / SIDE) as f64];
            }
        }
        (sum.map(|sum| sum / count as f64), count)
    }

    #[test]
    fn a_picture_shows_its_scene() {
        let mut rng = StdRng::seed_from_u64(2);
        for _ in 0..300 {
            let scene = Scene::draw(false, &mut rng);
            let picture = scene.picture(&mut rng);
            let (place, size) = seen(&picture, scene.first.color);
            let least = if scene.first.is_big { 25 } else { 7 };
            assert!(size >= least * scene.first.count, "{scene:?} {size}");
            let Some((relation, second)) = scene.other else { continue };
            let (other, _) = seen(&picture, second.color);
            let is_so = match relation {
                Relation::LeftOf => place[0] < other[0],
                Relation::Above => place[1] < other[1],
                Relation::Inside => (place[0] - other[0]).hypot(place[1] - other[1]) < 8.0,
            };
            assert!(is_so, "{scene:?} {place:?} {other:?}");
        }
    }
}
