//! Line charts as SVG, drawn with the page's colours.

use std::fmt::Write as _;

/// One line of a chart.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    /// Name in the legend.
    pub(crate) name: String,
    /// Place in the palette, from 0.
    pub(crate) colour: usize,
    /// Drawn with dashes and small marks: what is there to compare with.
    pub(crate) faint: bool,
    /// Points from left to right: x, y and the mark's own text.
    pub(crate) points: Vec<(f64, f64, String)>,
    /// Least and greatest value at an x, drawn as a bar beside the line.
    pub(crate) bars: Vec<(f64, f64, f64)>,
}

impl Series {
    pub(crate) fn new(name: &str, colour: usize) -> Self {
        Self { name: name.to_owned(), colour, faint: false, points: Vec::new(), bars: Vec::new() }
    }
}

/// A chart.
#[derive(Clone, Debug)]
pub(crate) struct Chart {
    /// What the chart shows, for those who do not see it.
    pub(crate) title: String,
    /// Label of the horizontal axis.
    pub(crate) x: String,
    /// Label of the vertical axis, which begins at 0.
    pub(crate) y: String,
    /// Whether x is a power-of-two-like quantity with a tick at every value that occurs.
    pub(crate) steps: bool,
    /// Whether to write each point's text beside it.
    pub(crate) labelled: bool,
    /// The lines.
    pub(crate) series: Vec<Series>,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 26.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 46.0;

/// A scale from values to places on the page.
struct Scale {
    log: bool,
    low: f64,
    high: f64,
    from: f64,
    to: f64,
}

impl Scale {
    fn place(&self, value: f64) -> f64 {
        let level = |value: f64| if self.log { value.max(f64::MIN_POSITIVE).ln() } else { value };
        let (low, high) = (level(self.low), level(self.high));
        let part = if high > low { (level(value) - low) / (high - low) } else { 0.5 };
        self.from + (self.to - self.from) * part
    }
}

/// A round step of 1, 2 or 5 times a power of ten that divides `high` into at most `parts`.
fn step(high: f64, parts: f64) -> f64 {
    let rough = (high / parts).max(1e-12);
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= rough * 0.999_999);
    power * factor.unwrap_or(10.0)
}

/// A number with as many decimals as the step needs, thousands apart.
pub(crate) fn number(value: f64, step: f64) -> String {
    let decimals = (-step.log10().floor()).clamp(0.0, 6.0) as usize;
    let text = format!("{value:.decimals$}");
    let (whole, rest) = text.split_at(text.find('.').unwrap_or(text.len()));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push('\u{2009}');
        }
        grouped.push(digit);
    }
    format!("{sign}{grouped}{rest}")
}

/// Text between tags.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

impl Chart {
    /// Legend and drawing; nothing if there is nothing to draw.
    pub(crate) fn html(&self) -> String {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let bars = || self.series.iter().flat_map(|series| &series.bars);
        let xs: Vec<f64> = points().map(|point| point.0).chain(bars().map(|bar| bar.0)).collect();
        let top = points().map(|point| point.1).chain(bars().map(|bar| bar.2)).fold(0.0, f64::max);
        if xs.is_empty() || !top.is_finite() {
            return String::new();
        }
        let y_step = step(if top > 0.0 { top } else { 1.0 }, 5.0);
        let y_high = (top / y_step).ceil().max(1.0) * y_step;
        let (x_low, x_high) = xs.iter().fold((f64::INFINITY, 0.0_f64), |(l, h), &x| (l.min(x), h.max(x)));
        let x_step = step(if x_high > 0.0 { x_high } else { 1.0 }, 6.0);
        let x = if self.steps {
            Scale { log: true, low: x_low, high: x_high, from: LEFT + 22.0, to: WIDTH - RIGHT - 22.0 }
        } else {
            let high = (x_high / x_step).ceil().max(1.0) * x_step;
            Scale { log: false, low: 0.0, high, from: LEFT, to: WIDTH - RIGHT }
        };
        let y = Scale { log: false, low: 0.0, high: y_high, from: HEIGHT - BOTTOM, to: TOP };
        let mut out = self.legend();
        put(
            &mut out,
            format_args!(
                "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\n",
                escape(&self.title)
            ),
        );
        let mut tick = 0.0;
        while tick <= y_high * 1.000_001 {
            let at = y.place(tick);
            put(
                &mut out,
                format_args!(
                    "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
                 <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
                    WIDTH - RIGHT,
                    LEFT - 8.0,
                    at + 4.0,
                    number(tick, y_step)
                ),
            );
            tick += y_step;
        }
        for (value, text) in self.x_ticks(&xs, &x, x_step) {
            let at = x.place(value);
            put(
                &mut out,
                format_args!(
                    "<line class=\"tick\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{}\" y2=\"{}\"/>\
                 <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>\n",
                    HEIGHT - BOTTOM,
                    HEIGHT - BOTTOM + 5.0,
                    HEIGHT - BOTTOM + 19.0
                ),
            );
        }
        put(
            &mut out,
            format_args!(
                "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{1}\" y2=\"{1}\"/>\
             <text class=\"name\" x=\"{2:.1}\" y=\"{3}\" text-anchor=\"middle\">{4}</text>\
             <text class=\"name\" x=\"14\" y=\"{5:.1}\" text-anchor=\"middle\" transform=\"rotate(-90 14 {5:.1})\">{6}</text>\n",
                WIDTH - RIGHT,
                HEIGHT - BOTTOM,
                (LEFT + WIDTH - RIGHT) / 2.0,
                HEIGHT - 8.0,
                escape(&self.x),
                (TOP + HEIGHT - BOTTOM) / 2.0,
                escape(&self.y)
            ),
        );
        for series in &self.series {
            self.draw(series, &x, &y, &mut out);
        }
        out.push_str("</svg>\n");
        out
    }

    fn x_ticks(&self, xs: &[f64], scale: &Scale, step: f64) -> Vec<(f64, String)> {
        if self.steps {
            let mut values = xs.to_vec();
            values.sort_by(f64::total_cmp);
            values.dedup();
            return values.into_iter().map(|value| (value, number(value, 1.0))).collect();
        }
        let count = (scale.high / step).round() as usize;
        (0..=count).map(|index| index as f64 * step).map(|value| (value, number(value, step))).collect()
    }

    fn legend(&self) -> String {
        let mut out = String::from("<div class=\"legend\">");
        for series in &self.series {
            let dashes = if series.faint { " stroke-dasharray=\"4 3\"" } else { "" };
            put(
                &mut out,
                format_args!(
                    "<span><svg class=\"key c{}\" viewBox=\"0 0 26 10\"><line x1=\"0\" x2=\"26\" y1=\"5\" y2=\"5\"{dashes}/></svg>{}</span>",
                    series.colour,
                    escape(&series.name)
                ),
            );
        }
        out.push_str("</div>\n");
        out
    }

    fn draw(&self, series: &Series, x: &Scale, y: &Scale, out: &mut String) {
        let (dashes, radius) = if series.faint { (" stroke-dasharray=\"5 4\"", 2.5) } else { ("", 4.0) };
        put(out, format_args!("<g class=\"c{}{}\">", series.colour, if series.faint { " faint" } else { "" }));
        for &(at, low, high) in &series.bars {
            // Bars of several series stand beside each other.
            let at = x.place(at) + (series.colour as f64 - 1.5) * 14.0;
            let (top, bottom) = (y.place(high), y.place(low));
            put(
                out,
                format_args!(
                    "<rect x=\"{:.1}\" y=\"{top:.1}\" width=\"10\" height=\"{:.1}\" rx=\"2\"><title>{}: {} to {}</title></rect>",
                    at - 5.0,
                    (bottom - top).max(2.0),
                    escape(&series.name),
                    number(low, 0.1),
                    number(high, 0.1)
                ),
            );
        }
        let places: Vec<String> =
            series.points.iter().map(|point| format!("{:.1},{:.1}", x.place(point.0), y.place(point.1))).collect();
        if places.len() > 1 {
            put(out, format_args!("<polyline points=\"{}\"{dashes}/>", places.join(" ")));
        }
        for (at, value, text) in &series.points {
            let (px, py) = (x.place(*at), y.place(*value));
            put(
                out,
                format_args!(
                    "<circle cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"{radius}\"><title>{}, {}: {}</title></circle>",
                    escape(&series.name),
                    escape(text),
                    number(*value, if *value < 100.0 { 0.01 } else { 0.1 })
                ),
            );
            if self.labelled && !series.faint {
                put(out, format_args!("<text x=\"{:.1}\" y=\"{:.1}\">{}</text>", px + 8.0, py - 7.0, escape(text)));
            }
        }
        out.push_str("</g>\n");
    }
}

/// Appends; writing to a string does not fail.
pub(crate) fn put(out: &mut String, text: std::fmt::Arguments<'_>) {
    let _infallible = out.write_fmt(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round() {
        for (high, wanted) in [(1.0, 0.2), (7.3, 2.0), (99.0, 20.0), (100.0, 20.0), (101.0, 50.0), (0.004, 0.001)] {
            assert!((step(high, 5.0) / wanted - 1.0).abs() < 1e-9, "{high}: {}", step(high, 5.0));
        }
        assert_eq!(number(1_234_567.25, 0.5), "1\u{2009}234\u{2009}567.2");
        assert_eq!((number(-1000.0, 20.0), number(0.1, 0.02)), ("-1\u{2009}000".to_owned(), "0.10".to_owned()));
    }

    #[test]
    fn nothing_and_one_point_are_charts_too() {
        let chart = |points: Vec<(f64, f64, String)>| Chart {
            title: "t".to_owned(),
            x: "x".to_owned(),
            y: "y".to_owned(),
            steps: true,
            labelled: false,
            series: vec![Series { points, ..Series::new("a<b", 0) }],
        };
        assert_eq!(chart(Vec::new()).html(), "");
        let one = chart(vec![(1.0, 0.0, "c=1".to_owned())]).html();
        assert!(one.contains("a&lt;b, c=1: 0.00") && !one.contains("NaN") && !one.contains("inf"), "{one}");
    }
}
