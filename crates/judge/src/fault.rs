//! What is wrong with an output, in words that an agent may read: which output, which family of
//! inputs, which metric, roughly where. Never the data.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which test an output failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Root mean square error over that of the baseline, or over the noise of the region.
    Ratio,
    /// The worst single element, relative to its size and its row's own error.
    Element,
    /// Root mean square error over the spread of the truth.
    Centred,
    /// NaN or infinity where there should be a number, or the other way round.
    NonFinite,
    /// Unequal bits where bits must be equal.
    Bits,
    /// Element type or shape.
    Shape,
}

/// Where the first wrong element lies, in eighths of rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// First and one past the last row of the band.
    pub rows: (u64, u64),
    /// Rows in all (all dimensions but the last).
    pub of_rows: u64,
    /// First and one past the last column of the band.
    pub columns: (u64, u64),
    /// Columns in all (the last dimension).
    pub of_columns: u64,
}

impl Place {
    /// The place of element `index` in a tensor of this shape.
    pub fn of(index: u64, shape: &[u64]) -> Self {
        let of_columns = shape.last().copied().unwrap_or(1).max(1);
        let of_rows = (shape.iter().product::<u64>() / of_columns).max(1);
        let band = |at: u64, of: u64| {
            let width = of.div_ceil(8);
            let first = at / width * width;
            (first, (first + width).min(of))
        };
        Self {
            rows: band(index / of_columns, of_rows),
            of_rows,
            columns: band(index % of_columns, of_columns),
            of_columns,
        }
    }
}

/// One failed test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// Which output.
    pub output: usize,
    /// Which family of inputs.
    pub family: String,
    /// Which test.
    pub metric: Metric,
    /// What was found; capped to a finite number.
    pub value: f64,
    /// What is allowed.
    pub limit: f64,
    /// Where the first bad element lies, for tests of elements.
    pub place: Option<Place>,
    /// Share of bad elements among those looked at.
    pub share: Option<f64>,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "output {} on inputs `{}`: ", self.output, self.family)?;
        let (value, limit) = (self.value, self.limit);
        match self.metric {
            Metric::Ratio => {
                write!(f, "rms error is {value:.3} times what honest roundings give, limit {limit}")?;
            }
            Metric::Element => write!(f, "element error score {value:.3e}, limit {limit}")?,
            Metric::Centred => {
                write!(f, "rms error is {value:.3e} of the spread of the true values, limit {limit:.1e}")?;
            }
            Metric::NonFinite => {
                f.write_str("NaN or infinity does not stand where it should (an element that is never written reads as NaN)")?;
            }
            Metric::Bits => f.write_str("bits differ where they must be equal")?,
            Metric::Shape => f.write_str("wrong element type or shape")?,
        }
        if let Some(place) = self.place {
            write!(
                f,
                "; first bad element in rows {}..{} of {}, columns {}..{} of {}",
                place.rows.0, place.rows.1, place.of_rows, place.columns.0, place.columns.1, place.of_columns
            )?;
        }
        if let Some(share) = self.share {
            let words = match share {
                s if s >= 0.99 => "all",
                s if s >= 0.5 => "most",
                s if s >= 0.05 => "some",
                _ => "few",
            };
            write!(f, "; {words} elements are off")?;
        }
        Ok(())
    }
}

/// JSON holds no infinity; a metric that is not finite is as bad as can be.
pub(crate) fn capped(value: f64) -> f64 {
    if value.is_finite() { value } else { f64::MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_coarse() {
        let place = Place::of(4095 * 1000 + 999, &[4, 1024, 1000]);
        assert_eq!((place.rows, place.of_rows), ((3584, 4096), 4096));
        assert_eq!((place.columns, place.of_columns), ((875, 1000), 1000));
        assert_eq!(Place::of(0, &[]).rows, (0, 1));
        assert_eq!(Place::of(2, &[3]).columns, (2, 3));
    }

    #[test]
    fn faults_read_well() {
        let fault = Fault {
            output: 0,
            family: "normal".into(),
            metric: Metric::Element,
            value: 123_456.0,
            limit: 64.0,
            place: Some(Place::of(17, &[8, 16])),
            share: Some(0.02),
        };
        assert_eq!(
            fault.to_string(),
            "output 0 on inputs `normal`: element error score 1.235e5, limit 64; first bad element in rows 1..2 of 8, columns 0..2 of 16; few elements are off"
        );
    }
}
