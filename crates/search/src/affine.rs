//! Index arithmetic: affine expressions over the iteration variables, and the reshape of one index
//! into another.

/// `offset + Σ coefficient[d] * variable[d]` over the dimensions of an iteration space.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Affine {
    /// One coefficient for each iteration dimension.
    pub coefficients: Vec<i64>,
    /// The constant part.
    pub offset: i64,
}

/// The half-open range of values that each iteration variable takes.
pub type Domain = [(i64, i64)];

/// Why an index cannot be reshaped as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reshape {
    /// Iteration variable `dim` runs over a boundary of the new shape: cut it so that its inner part has `inner` steps.
    Split {
        /// The variable.
        dim: usize,
        /// Size of the inner part.
        inner: u64,
    },
    /// No cut makes it affine.
    Impossible,
}

impl Affine {
    /// A constant over `rank` variables.
    pub fn constant(rank: usize, offset: i64) -> Self {
        Self { coefficients: vec![0; rank], offset }
    }

    /// Adds `scale * other`.
    pub fn add_scaled(&mut self, other: &Self, scale: i64) {
        for (mine, theirs) in self.coefficients.iter_mut().zip(&other.coefficients) {
            *mine += theirs * scale;
        }
        self.offset += other.offset * scale;
    }

    /// The same with another constant added.
    #[must_use]
    pub fn shifted(&self, by: i64) -> Self {
        Self { coefficients: self.coefficients.clone(), offset: self.offset + by }
    }

    /// Smallest and largest value over a domain.
    pub fn range(&self, domain: &Domain) -> (i64, i64) {
        let mut low = self.offset;
        let mut high = self.offset;
        for (coefficient, (start, end)) in self.coefficients.iter().zip(domain) {
            let (a, b) = (coefficient * start, coefficient * (end - 1));
            low += a.min(b);
            high += a.max(b);
        }
        (low, high)
    }
}

/// Row-major strides of a shape.
pub fn row_major(shape: &[u64]) -> Vec<i64> {
    let mut strides = vec![1_i64; shape.len()];
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1] * shape[i + 1] as i64;
    }
    strides
}

/// The row-major position of an index in a shape.
pub fn flatten(index: &[Affine], shape: &[u64], rank: usize) -> Affine {
    let mut flat = Affine::constant(rank, 0);
    for (part, stride) in index.iter().zip(row_major(shape)) {
        flat.add_scaled(part, stride);
    }
    flat
}

/// The index in `shape` of row-major position `flat`, exact over `domain` or an error.
pub fn unflatten(flat: &Affine, shape: &[u64], domain: &Domain) -> Result<Vec<Affine>, Reshape> {
    let rank = flat.coefficients.len();
    let strides = row_major(shape);
    let mut index: Vec<Affine> = vec![Affine::constant(rank, 0); shape.len()];
    for (dim, coefficient) in flat.coefficients.iter().copied().enumerate() {
        let (start, end) = domain[dim];
        let steps = end - start;
        if coefficient == 0 || steps <= 1 {
            continue;
        }
        if coefficient < 0 {
            return Err(Reshape::Impossible);
        }
        // The dimension that this variable walks along: the largest stride that divides its own.
        let along = (0..shape.len())
            .filter(|k| shape[*k] > 1 && strides[*k] <= coefficient)
            .min_by_key(|k| -strides[*k]);
        let along = along.ok_or(Reshape::Impossible)?;
        if coefficient % strides[along] != 0 {
            return Err(Reshape::Impossible);
        }
        let extent = strides[along] * shape[along] as i64;
        if coefficient * (steps - 1) >= extent {
            if extent % coefficient == 0 && steps % (extent / coefficient) == 0 {
                return Err(Reshape::Split { dim, inner: (extent / coefficient) as u64 });
            }
            return Err(Reshape::Impossible);
        }
        index[along].coefficients[dim] = coefficient / strides[along];
    }
    // Variables count from where their range starts, so that offsets are those of the first point.
    let first =
        |part: &Affine| part.coefficients.iter().zip(domain).map(|(c, (start, _))| c * start).sum::<i64>();
    let mut rest = flat.offset + first(flat);
    for (part, stride) in index.iter_mut().zip(&strides) {
        let offset = rest.div_euclid(*stride);
        rest -= offset * stride;
        part.offset = offset - first(part);
    }
    let fits = index.iter().zip(shape).all(|(part, size)| {
        let (low, high) = part.range(domain);
        low >= 0 && high < *size as i64
    });
    if fits { Ok(index) } else { Err(Reshape::Impossible) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variables(sizes: &[u64]) -> (Affine, Vec<(i64, i64)>) {
        (Affine { coefficients: row_major(sizes), offset: 0 }, sizes.iter().map(|n| (0, *n as i64)).collect())
    }

    #[test]
    fn merging_dimensions_is_affine_and_splitting_asks_for_a_cut() {
        let (flat, domain) = variables(&[4, 16, 8]);
        let merged = unflatten(&flat, &[4, 128], &domain).unwrap();
        assert_eq!(merged[1].coefficients, vec![0, 8, 1]);
        let (flat, domain) = variables(&[4, 128]);
        assert_eq!(unflatten(&flat, &[4, 16, 8], &domain), Err(Reshape::Split { dim: 1, inner: 8 }));
        assert_eq!(unflatten(&flat, &[3, 171], &domain), Err(Reshape::Impossible));
    }

    #[test]
    fn offsets_that_carry_are_refused() {
        let (mut flat, domain) = variables(&[2, 4]);
        flat.offset = 1;
        assert_eq!(unflatten(&flat, &[3, 4], &domain), Err(Reshape::Impossible));
        flat.offset = 4;
        assert_eq!(unflatten(&flat, &[3, 4], &domain).unwrap()[0].offset, 1);
    }
}
