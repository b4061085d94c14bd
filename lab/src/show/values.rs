//! Names and parsers of the values of flags. The error messages say which values are valid; clap adds the flag.

fn parse<T: std::str::FromStr>(value: &str, wanted: &str, valid: impl Fn(&T) -> bool) -> Result<T, String> {
    value.parse().ok().filter(valid).ok_or_else(|| format!("expected {wanted}"))
}

/// Parses a whole number of at least 1.
pub fn positive(value: &str) -> Result<usize, String> {
    parse(value, "a whole number of at least 1", |&x| x > 0)
}

/// Parses a number above 0.
pub fn above_zero(value: &str) -> Result<f64, String> {
    parse(value, "a number above 0", |&x: &f64| x > 0.0 && x.is_finite())
}

/// Parses a number of at least 0.
pub fn not_negative(value: &str) -> Result<f64, String> {
    parse(value, "a number of at least 0", |&x: &f64| x >= 0.0 && x.is_finite())
}

/// Parses a number from 0 to 1.
pub(crate) fn up_to_one(value: &str) -> Result<f64, String> {
    parse(value, "a number from 0 to 1", |x| (0.0..=1.0).contains(x))
}

/// Parses a number above 0 and at most 1.
pub fn share(value: &str) -> Result<f64, String> {
    parse(value, "a number above 0 and at most 1", |&x: &f64| x > 0.0 && x <= 1.0)
}

/// Parses a number of at least 0 and below 1.
pub fn below_one(value: &str) -> Result<f64, String> {
    parse(value, "a number from 0 to below 1", |x| (0.0..1.0).contains(x))
}

/// Returns the name of a flag's value.
pub fn name(value: &impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}
