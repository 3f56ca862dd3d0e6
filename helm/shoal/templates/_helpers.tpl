{{- define "shoal.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* RELEASE-shoal, or RELEASE where that says shoal already; short enough for -operator. */ -}}
{{- define "shoal.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "shoal.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "shoal.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "shoal.operator" -}}
{{ include "shoal.fullname" . }}-operator
{{- end }}

{{- define "shoal.labels" -}}
app.kubernetes.io/name: {{ include "shoal.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* What the operator's pods are known by; these never change. */ -}}
{{- define "shoal.operatorLabels" -}}
app.kubernetes.io/name: {{ include "shoal.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "shoal.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "shoal.operator" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- /* An image: (dict "root" $ "image" .Values.images.agent) */ -}}
{{- define "shoal.image" -}}
{{- $name := .image.repository }}
{{- with .root.Values.images.registry }}{{ $name = printf "%s/%s" (trimSuffix "/" .) $name }}{{ end }}
{{- if .image.digest }}
{{- printf "%s@%s" $name .image.digest }}
{{- else }}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag) }}
{{- end }}
{{- end }}

{{- /* The namespaces that a namespaced operator sees, as JSON. */ -}}
{{- define "shoal.namespaces" -}}
{{- default (list .Release.Namespace) .Values.rbac.namespaces | uniq | toJson }}
{{- end }}

{{- /* The namespaces that this operator sees, or a star. */ -}}
{{- define "shoal.sees" -}}
{{- if .Values.rbac.namespaced }}{{ include "shoal.namespaces" . | fromJsonArray | join "," }}{{ else }}*{{ end }}
{{- end }}

{{- /*
Refuses a release that would see what another sees: each has a Lease in its own namespace, so both would lead, and
undo each other's work. And one whose ClusterRole would be called as another's. Only a cluster can say so: `helm template` knows of no other releases.
*/ -}}
{{- define "shoal.refuseAnother" -}}
{{- $mine := splitList "," (include "shoal.sees" .) }}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "").items }}
{{- $notes := .metadata.annotations | default dict }}
{{- $theirs := splitList "," (get $notes "shoal.dev/namespaces") }}
{{- $release := get $notes "meta.helm.sh/release-name" }}
{{- $home := get $notes "meta.helm.sh/release-namespace" }}
{{- if and $release (eq .metadata.name (include "shoal.operator" $)) (ne $home $.Release.Namespace) }}
{{- fail (printf "release %s in namespace %s has the name of this one's ClusterRole, %s: choose another name for this release, or fullnameOverride" $release $home .metadata.name) }}
{{- end }}
{{- if and (hasKey (.metadata.labels | default dict) "shoal.dev/sees") (or (ne $release $.Release.Name) (ne $home $.Release.Namespace)) }}
{{- range $mine }}
{{- if or (eq . "*") (has "*" $theirs) (has . $theirs) }}
{{- fail (printf "release %s in namespace %s sees %s already, and this one would too: two operators would undo each other's work. Uninstall that one, or give both namespaces of their own with rbac.namespaced and rbac.namespaces" $release $home (has "*" $theirs | ternary "all namespaces" (eq . "*" | ternary (join ", " $theirs) .))) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "shoal.hasPrometheus" -}}
{{- if .Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end }}
{{- end }}

{{- /* Those of the groups that only some clusters have which this one has, as JSON. */ -}}
{{- define "shoal.otherGroups" -}}
{{- $found := list }}
{{- range list "cert-manager.io" "monitoring.coreos.com" }}
{{- if $.Capabilities.APIVersions.Has (printf "%s/v1" .) }}{{ $found = append $found . }}{{ end }}
{{- end }}
{{- $found | toJson }}
{{- end }}

{{- /* What Pod Security's restricted level asks of a container. */ -}}
{{- define "shoal.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* Where pods may run, as JSON: (dict "of" .Values.worker) */ -}}
{{- define "shoal.place" -}}
{{- dict "nodeSelector" (.of.nodeSelector | default dict) "tolerations" (.of.tolerations | default list) "affinity" (.of.affinity | default dict) | toJson }}
{{- end }}

{{- /* OperatorSettings, as the operator reads them. */ -}}
{{- define "shoal.settings" -}}
images:
  coordinator: {{ include "shoal.image" (dict "root" . "image" .Values.images.coordinator) }}
  worker: {{ include "shoal.image" (dict "root" . "image" .Values.images.worker) }}
  agent: {{ include "shoal.image" (dict "root" . "image" .Values.images.agent) }}
  pullPolicy: {{ .Values.images.pullPolicy }}
  pullSecrets: {{ .Values.images.pullSecrets | default list | toJson }}
namespace: {{ .Release.Namespace | quote }}
operatorLabels:
  {{- include "shoal.operatorLabels" . | nindent 2 }}
enrolment: {{ include "shoal.operator" . }}.{{ .Release.Namespace }}.svc:8443
agentFloor: {{ .Values.agent.floor }}
coordinatorMemory: {{ .Values.coordinator.memory }}
workerMemory: {{ .Values.worker.memory }}
workerDisk: {{ .Values.worker.disk }}
coordinatorPlace: {{ include "shoal.place" (dict "of" .Values.coordinator) }}
workerPlace: {{ include "shoal.place" (dict "of" .Values.worker) }}
certManager: {{ .Values.certManager.enabled }}
podMonitors: {{ and .Values.podMonitor.enabled (eq (include "shoal.hasPrometheus" .) "true") }}
monitorLabels: {{ .Values.podMonitor.additionalLabels | default dict | toJson }}
monitorInterval: {{ .Values.podMonitor.interval | default "" | quote }}
networkPolicies: {{ .Values.networkPolicies.enabled }}
metricsFrom: {{ .Values.networkPolicies.metricsFrom | default list | toJson }}
offline: {{ .Values.offline }}
otherGroups: {{ include "shoal.otherGroups" . }}
{{- end }}
